"""Continuing a training with more steps, another schedule or other data, after one of its checkpoints.

`train.continue_from` is an input of the training: the same command finds the same directory again. Which
checkpoint it means is decided when that directory is begun, before any stage, and its files are linked there.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle31.errors import UserError
from eagle31.json_files import read_json, read_jsonl, write_json, write_jsonl
from train.artifact import TRAINING, Artifact, dotted, fingerprint, link_result, named_training
from train.config.run import RunConfig, Stage
from train.context import RunContext
from train.drafter.chosen import ChosenDrafter
from train.stages.training_inputs import CONTINUED, training_inputs
from train.trainer.checkpoint_files import (
    MANIFEST,
    STATE,
    DamagedCheckpoint,
    check_file,
    read_checked,
    write_checked,
)
from train.trainer.checkpoints import CHECKPOINTS, TrainState, best_path, saved_steps

VOCAB = "vocab.safetensors"
_BEGUN, _METRICS, _FIELD = "begun.json", "metrics.jsonl", "train.continue_from"
_SHOWN = 6  # settings that a message names


def _order_key(inputs: dict[str, Any]) -> str:
    """Return a fingerprint of what the order of the training rows depends on, apart from the seed."""
    return fingerprint(
        {name: inputs[name] for name in ("capture", "max_samples")}
        | {"row_tokens": inputs["train"]["row_tokens"]}
    )


def _validation_key(answers: Artifact, draft_tokens: int) -> str:
    """Return a fingerprint of what the acceptance length in validation depends on, apart from the drafter."""
    # Without `max_samples`, because another number of training samples leaves the held-out prompts.
    return fingerprint({"answers": answers.key, "draft_tokens": draft_tokens})


@dataclass(frozen=True)
class _Earlier:
    """A checkpoint of an earlier training."""

    directory: Path  # that of the train stage
    step: int

    def __str__(self) -> str:
        return f"{self.directory}@{self.step}"

    @property
    def checkpoint(self) -> Path:
        return self.directory / CHECKPOINTS / f"step-{self.step:08d}"

    @property
    def inputs(self) -> dict[str, Any]:
        return read_json(self.directory / _BEGUN)["inputs"]


def _earlier(origin: str, inputs: dict[str, Any]) -> _Earlier:
    """Return the newest or the named checkpoint of the training in an output directory.

    Args:
        inputs: of the training that continues it.

    Raises:
        UserError: there is none, or it has other fixed settings.
    """
    output_dir, step = named_training(origin)
    directory = (output_dir / TRAINING).resolve()
    steps = saved_steps(directory / CHECKPOINTS)
    if not steps:
        raise UserError(_FIELD, origin, "No training there has a checkpoint yet; give an output_dir.")
    found = _Earlier(directory, steps[-1] if step is None else step)
    if found.inputs["fixed"] != inputs["fixed"]:
        shown = differences(found.inputs["fixed"], inputs["fixed"])
        remedy = f"The training in {directory} cannot be continued with other settings of these: "
        raise UserError(_FIELD, origin, f"{remedy}{shown}. Use its settings.")
    if found.step not in steps:
        raise UserError(_FIELD, origin, f"The checkpoints there are of steps {steps}.")
    max_steps = inputs["train"]["max_steps"]
    if max_steps is not None and found.step >= max_steps:
        remedy = (
            f"The training in {directory} is at step {found.step} already. Give more steps, or "
            f"{_FIELD}=DIRECTORY@STEP for an earlier one."
        )
        raise UserError("train.max_steps", max_steps, remedy)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the settings that differ, for a message."""
    ours, theirs = (dict(dotted({n: v for n, v in one.items() if n != CONTINUED})) for one in (after, before))
    missing = object()
    found = [
        f"{key.removeprefix('fixed.')}: {theirs.get(key)} -> {ours.get(key)}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key, missing) != theirs.get(key, missing)
    ]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def begin_training(context: RunContext) -> None:
    """Write what the training depends on, and take over the checkpoint that it continues. Rank 0 calls.

    A directory that has a checkpoint stays as it is.

    Raises:
        UserError: there is no such checkpoint, it was deleted in the meantime, or it is damaged.
    """
    artifact, origin = context.artifacts[Stage.train], context.config.train.continue_from
    directory, inputs = artifact.directory, artifact.inputs
    if not saved_steps(directory / CHECKPOINTS):
        if origin is None:
            _note_other(context.output_dir, inputs)
            write_json(directory / _BEGUN, {"inputs": inputs})
        else:
            _continue(_earlier(origin, inputs), directory, inputs)
    link_training(context)


def link_training(context: RunContext) -> None:
    """Have `training` in the output directory be this run's, which `train.continue_from` finds there."""
    link_result(context.output_dir, TRAINING, context.artifacts[Stage.train].directory)


def _note_other(output_dir: Path, inputs: dict[str, Any]) -> None:
    """Say what differs from the training that the output directory has so far, if there is one."""
    other = (output_dir / TRAINING).resolve()
    if steps := saved_steps(other / CHECKPOINTS):
        print(
            f"train: starts at the first step. The training in {other}, which is at step {steps[-1]}, had "
            f"other settings: {differences(read_json(other / _BEGUN)['inputs'], inputs)}. With those the "
            f"command resumes it; {_FIELD}={output_dir} continues it with the new ones.",
            flush=True,
        )


def _continue(earlier: _Earlier, directory: Path, inputs: dict[str, Any]) -> None:
    write_json(directory / _BEGUN, {"inputs": inputs, "continued_from": str(earlier)})
    try:
        _take_over(earlier, directory)
    except FileNotFoundError as error:
        remedy = f"That training has just deleted {error.filename}; give the command again."
        raise UserError(_FIELD, earlier, remedy) from None
    except DamagedCheckpoint as error:
        raise UserError(
            _FIELD, earlier, f"This checkpoint is damaged: {error}. Give another @STEP."
        ) from None
    changed = differences(earlier.inputs, inputs)
    print(f"train: continues {earlier.directory} after step {earlier.step} ({changed})", flush=True)


def _take_over(earlier: _Earlier, directory: Path) -> None:
    """Link the files of the earlier checkpoint: none is ever changed, and that training may be running."""
    checkpoints = directory / CHECKPOINTS
    partial = checkpoints / ".taken_over.partial"
    shutil.rmtree(partial, ignore_errors=True)
    state = read_checked(earlier.checkpoint / STATE)
    for file, entry in read_checked(earlier.checkpoint / MANIFEST)["files"].items():
        check_file(earlier.checkpoint / file, entry)
    shutil.copytree(earlier.checkpoint, partial, copy_function=_link)
    shutil.rmtree(checkpoints / "best", ignore_errors=True)
    if not _take_over_best(earlier, state["best_step"], checkpoints):
        state["best_step"] = None  # the first validation chooses one
    (partial / STATE).unlink()  # the link, not the earlier training's file
    write_checked(partial / STATE, state | {"continued_at": earlier.step})
    shutil.copyfile(earlier.directory / VOCAB, directory / VOCAB)
    lines = read_jsonl(earlier.directory / _METRICS)
    write_jsonl(directory / _METRICS, [line for line in lines if line["step"] <= earlier.step])
    os.replace(partial, checkpoints / earlier.checkpoint.name)


def _take_over_best(earlier: _Earlier, best_step: int | None, checkpoints: Path) -> bool:
    """Link the best weights up to the checkpoint; return False if a later step has replaced them."""
    if best_step is None:
        return False
    theirs, ours = (best_path(one, best_step) for one in (earlier.directory / CHECKPOINTS, checkpoints))
    ours.parent.mkdir(parents=True)
    try:
        for suffix in (".safetensors", ".json"):
            _link(str(theirs.with_suffix(suffix)), str(ours.with_suffix(suffix)))
    except FileNotFoundError:
        return False
    return True


def _link(source: str, copy: str) -> str:
    """Link a file; copy it where the two are not on the same file system."""
    try:
        os.link(source, copy)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, copy)
    return copy


def kept_vocab(config: RunConfig, drafter: ChosenDrafter, data: Artifact) -> dict[str, str]:
    """Return the input of the vocab stage that says which training's vocabulary it keeps; empty for none.

    The draft head belongs to one vocabulary, so that other data must not change it.
    """
    settings = drafter.settings
    if config.train.continue_from is None or settings.draft_vocab_size is None or settings.init_from:
        return {}
    return {"kept": fingerprint(training_inputs(config, drafter, data))}


def keep_vocab(artifact: Artifact, directory: Path) -> None:
    """Keep what the vocab stage made next to the checkpoints, for the export and for what continues them."""
    partial = directory / f".{VOCAB}.partial"
    shutil.copyfile(artifact.directory / VOCAB, partial)
    os.replace(partial, directory / VOCAB)


def prepared(state: TrainState, artifacts: Mapping[Stage, Artifact], draft_tokens: int) -> TrainState:
    """Return the state with which the loop begins.

    With the data of before, the order of its rows continues. With other data, or rows of another length, a
    new epoch begins. If the held-out prompts are others, the best weights are chosen again.
    """
    order = _order_key(artifacts[Stage.train].inputs)
    validated_on = _validation_key(artifacts[Stage.answers], draft_tokens)
    if state.order != order:
        begun = state.epoch + (1 if state.row else 0)
        state = replace(state, order=order, epoch=begun, row=0, first_epoch=begun)
    if state.validated_on != validated_on:
        state = replace(state, validated_on=validated_on, best_step=None, best_acceptance_length=0.0)
    return state
