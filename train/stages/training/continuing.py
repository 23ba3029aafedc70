"""Continuing a training: which checkpoint it is, what may change, and how its directory begins.

What a training continues is one of its inputs. It is decided when its directory is begun, and every later
command with the same settings finds it again. Rank 0 decides, and the other ranks learn it:

    in output_dir, or in DIRECTORY             auto                     DIRECTORY[@STEP]   none
    a training with these inputs was begun     resumes [1]              resumes [1]        resumes [1]
    a checkpoint with the same fixed inputs    the newest continues [3] it continues       first step
    ... after which no step is left            first step, and why [2]  refused            first step
    only checkpoints with other fixed inputs   first step, and why      refused            first step
    no checkpoint                              first step               refused            first step

[1] With DIRECTORY if it continues a training there, and with none if it continues none.
[2] Refused where the vocab stage kept the earlier draft vocabulary for other data: it is not for a new head.
[3] Of those with equal settings and data, apart from the number of steps; without any, of all.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from data.target.tokenizer import tokenizer_fingerprint
from eagle31.errors import UserError
from eagle31.json_files import expecting, file_within, read_json, read_jsonl, write_json, write_jsonl
from eagle31.tensor_files import load_tensors
from train.artifact import MANIFEST as FINISHED
from train.artifact import Artifact, fingerprint
from train.config.run import RunConfig, Stage, training_seed
from train.config.training import AUTO, NONE, OptimConfig
from train.context import RunContext
from train.distributed import World, on_main_first, read_when_set, shared_values
from train.drafter.chosen import ChosenDrafter
from train.engines.inputs import target_inputs
from train.trainer.checkpoints import BEST, CHECKPOINTS, EarlierTraining, TrainState, saved_steps
from train.trainer.learning_rate import with_rates
from train.trainer.parts import MANIFEST, STATE, DamagedCheckpoint, check_file, read_checked, write_checked

VOCAB = "vocab.safetensors"
KEPT = "kept"  # the input of the vocab stage that says which earlier vocabulary it keeps
CONTINUED = "continued"  # the input of a training that continues another
_BEGUN, _METRICS, _FIELD = "begun.json", "metrics.jsonl", "train.continue_from"
_EARLIER, _CONTINUED = "stages/train/earlier", "stages/train/continued"
_LINKED = (Stage.data, Stage.vocab, Stage.answers, Stage.capture)
_SHOWN = 6  # settings that a message names
_LENGTHS = ("max_steps", "num_epochs")  # settings of `train` that differ where a training is made longer


def fixed_inputs(config: RunConfig, drafter: ChosenDrafter) -> dict[str, Any]:
    """Return the settings that cannot change when a training is continued."""
    target, shape = drafter.target, plain(asdict(config.drafter))
    shape.pop("init_revision")
    if shape.pop("init_from") is not None:
        shape["init_from"] = drafter.initial_fingerprint
    fixed = {
        "target": target_inputs(config.target, target.parts.fingerprint),
        "tokenizer": tokenizer_fingerprint(target.tokenizer),
        "template": target.template_fingerprint,
        "aux_layer_ids": list(drafter.aux_layer_ids),
        "drafter": shape,
        "optimizer": config.optim.name.value,
        # How DeepSpeed splits the training state changes no result.
        "precision": config.deepspeed.precision.value,
        "seed": training_seed(config),
    }
    return json.loads(json.dumps(fixed))  # as it is read from a file


def chosen_optim(config: RunConfig, drafter: ChosenDrafter) -> OptimConfig:
    """Return the settings of the optimizer, with the rule's learning rates where the recipe gives none."""
    return with_rates(config.optim, drafter.config(drafter.target.parts.vocab_size))


def training_inputs(config: RunConfig, drafter: ChosenDrafter, data: Artifact) -> dict[str, Any]:
    """Return what a training depends on, apart from the vocabulary, the states and what it continues."""
    training = asdict(config.train)
    # These change no weights, or are a separate input: what is in fact continued. validate_every stays in: it
    # affects which step is chosen as the best.
    for name in ("log_every", "save_every", "keep_checkpoints", "continue_from", "seed"):
        training.pop(name)
    return {
        "fixed": fixed_inputs(config, drafter),
        "data": data.key,
        "max_samples": config.capture.max_samples,
        "optim": plain(asdict(chosen_optim(config, drafter))),
        "train": plain(training),
        "draft_tokens": config.evaluate.draft_tokens,
    }


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the values of enums."""
    return {key: getattr(value, "value", value) for key, value in values.items()}


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


def share_earlier(context: RunContext) -> UserError | None:
    """Set `context.earlier` as rank 0 finds it. Every rank calls, once the data are located.

    Returns:
        Why there is no earlier training, on rank 0; it matters only if this run has to begin one.
    """
    values, problem = shared_values(), None
    if context.world.is_main:
        earlier, problem = _earlier(context)
        values.set(_EARLIER, json.dumps(earlier and earlier.to_json()))
    found = json.loads(read_when_set(values, _EARLIER))
    context.earlier = found and EarlierTraining.from_json(found)
    return problem


def _earlier(context: RunContext) -> tuple[EarlierTraining | None, UserError | None]:
    origin = context.config.train.continue_from
    if origin == NONE:
        return None, None
    inputs = training_inputs(context.config, context.drafter, context.artifacts[Stage.data])
    inputs, problem = json.loads(json.dumps(inputs)), None  # as they are read from a file
    if origin != AUTO:
        try:
            return _newest(*_parsed(origin), inputs, named=True), None
        except UserError as error:
            problem = error
    # The checkpoint that this run once continued may be gone; the run's own training has its vocabulary.
    try:
        return _newest(context.output_dir, None, inputs, named=False), problem
    except UserError as error:
        return None, problem or error


def _parsed(origin: str) -> tuple[Path, int | None]:
    """Return directory and step of `DIRECTORY` or `DIRECTORY@STEP`; None is the newest checkpoint."""
    directory, separator, step = origin.rpartition("@")
    return (Path(directory), int(step)) if separator and step.isdigit() else (Path(origin), None)


def _newest(
    output_dir: Path, step: int | None, inputs: dict[str, Any], *, named: bool
) -> EarlierTraining | None:
    """Return the newest training in an output directory that has the same fixed settings.

    One that differs in its number of steps alone comes before those with other settings or data.

    Args:
        step: of the checkpoint; None for the newest.
        inputs: of the training that continues it, from `training_inputs`.
        named: whether the user named the directory.

    Raises:
        UserError: all trainings there have other fixed settings; or the directory that the user named has
            no such checkpoint.
    """
    trainings = sorted(_trainings(output_dir), key=lambda one: _newest_time(one), reverse=True)
    if not trainings:
        if named:
            raise UserError(_FIELD, output_dir, "No training there has a checkpoint yet; give an output_dir.")
        return None
    theirs = {one: _begun(one / _BEGUN)["inputs"] for one in trainings}
    same = [one for one in trainings if theirs[one]["fixed"] == inputs["fixed"]]
    same.sort(key=lambda one: not _equal_but_longer(theirs[one], inputs))
    if not same:
        shown = _differences(theirs[trainings[0]]["fixed"], inputs["fixed"])
        raise UserError(
            _FIELD,
            output_dir if named else "auto",
            f"The training in {trainings[0]} cannot be continued with other settings of these: {shown}."
            + (" Use its settings." if named else ""),
        )
    for one in same:
        steps = saved_steps(one / CHECKPOINTS)
        if step is None or step in steps:
            return EarlierTraining(one, steps[-1] if step is None else step)
    raise UserError(
        _FIELD,
        f"{output_dir}@{step}",
        f"The checkpoints there are of steps {saved_steps(same[0] / CHECKPOINTS)}.",
    )


def _trainings(output_dir: Path) -> Iterator[Path]:
    """Yield the directories of trainings with a checkpoint: those of a run, or the one that is named."""
    for directory in (output_dir, *output_dir.glob("artifacts/train-*")):
        if (directory / _BEGUN).exists() and saved_steps(directory / CHECKPOINTS):
            yield directory


def _newest_time(directory: Path) -> float:
    return max(path.stat().st_mtime for path in directory.glob(f"{CHECKPOINTS}/step-*"))


def _equal_but_longer(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Return whether two trainings have the same settings and data, apart from their number of steps."""
    lengths = dict.fromkeys(_LENGTHS)
    return all(theirs.get(name) == value for name, value in ours.items() if name != "train") and (
        theirs["train"] | lengths == ours["train"] | lengths
    )


def _begun(path: Path) -> dict[str, Any]:
    """Return the description of a training that was begun. Raises UserError if the file is damaged."""
    with expecting(path, "the description of a training"):
        content = read_json(path)
        if not isinstance(content["inputs"]["fixed"], dict):
            raise TypeError("its settings are no object")
        if content["continued_from"] is not None:
            EarlierTraining.from_json(content["continued_from"])
        return content


def share_continued(context: RunContext, inputs: dict[str, Any], problem: UserError | None) -> None:
    """Set `context.continued` as rank 0 decides. Every rank calls, once the stages before are located.

    A training that was begun with the same settings continues what it did then, so that it is found again.

    Args:
        inputs: of the train stage, apart from what it continues.
        problem: what `share_earlier` returned.

    Raises:
        UserError: on rank 0; the user named an earlier training, or continues it with other data, and it
            cannot be continued with these settings.
    """
    values = shared_values()
    if context.world.is_main:
        begun = _continued_by_begun(context, inputs)
        continued = begun[0] if begun else _continued(context, inputs, problem)
        values.set(_CONTINUED, json.dumps(continued and continued.to_json()))
    found = json.loads(read_when_set(values, _CONTINUED))
    context.continued = found and EarlierTraining.from_json(found)


def _continued_by_begun(context: RunContext, inputs: dict[str, Any]) -> list[EarlierTraining | None]:
    """Return what each training that was begun with these inputs continues, the newest first."""
    wanted, found = _comparable(json.loads(json.dumps(inputs))), []
    paths = [
        path
        for path in context.output_dir.glob(f"artifacts/train-*/{_BEGUN}")
        if saved_steps(path.parent / CHECKPOINTS) or (path.parent / FINISHED).exists()
    ]
    for begun in map(_begun, sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)):
        continued = begun["continued_from"] and EarlierTraining.from_json(begun["continued_from"])
        if _comparable(begun["inputs"]) == wanted and _meant(context.config.train.continue_from, continued):
            found.append(continued)
    return found


def _meant(origin: str, continued: EarlierTraining | None) -> bool:
    """Return whether the setting means a training that continues this one."""
    if origin in (AUTO, NONE):
        return origin == AUTO or continued is None
    path, step = _parsed(origin)
    if continued is None or step not in (None, continued.step):
        return False
    training = continued.directory.resolve()
    return path.resolve() in (training, training.parent.parent)


def _comparable(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a training without what it continues."""
    return {name: value for name, value in inputs.items() if name != CONTINUED}


def _continued(
    context: RunContext, inputs: dict[str, Any], problem: UserError | None
) -> EarlierTraining | None:
    origin = context.config.train.continue_from
    if origin == NONE:
        return None
    try:
        if problem is not None:
            raise problem
        if context.earlier is not None:
            _check_steps(context.earlier, context.config.train.max_steps, inputs)
    except UserError as error:
        # A draft vocabulary that was kept for the drafter of the earlier training is not for a new one.
        if origin != AUTO or KEPT in context.artifacts[Stage.vocab].inputs:
            raise
        print(f"train: starts at the first step: {error.remedy}", flush=True)
        return None
    return context.earlier


def _check_steps(earlier: EarlierTraining, max_steps: int | None, inputs: dict[str, Any]) -> None:
    """Raise UserError if no step is left to train."""
    if max_steps is not None and earlier.step >= max_steps:
        changed = _differences(_comparable(_begun(earlier.directory / _BEGUN)["inputs"]), _comparable(inputs))
        raise UserError(
            "train.max_steps",
            max_steps,
            f"The training in {earlier.directory} is at step {earlier.step} already, with other settings "
            f"({changed}). Give more steps to continue it, {_FIELD}=DIRECTORY@STEP for an earlier one, "
            f"or {_FIELD}=none to start at the first step.",
        )


def _differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the settings that differ, for a message."""
    ours, theirs = dict(_leaves(after)), dict(_leaves(before))
    missing = object()
    found = [
        f"{key.removeprefix('fixed.')}: {theirs.get(key)} -> {ours.get(key)}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key, missing) != theirs.get(key, missing)
    ]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def begin_training(artifact: Artifact, earlier: EarlierTraining | None) -> None:
    """Write what the training depends on, and take over the checkpoint that it continues. Rank 0 calls.

    A directory that has a checkpoint stays as it is.

    Args:
        earlier: the training that this one continues.

    Raises:
        UserError: the earlier training deleted the checkpoint in the meantime, or it is damaged.
    """
    directory = artifact.directory
    if saved_steps(directory / CHECKPOINTS):
        return
    continued_from = earlier and earlier.to_json()
    write_json(directory / _BEGUN, {"inputs": artifact.inputs, "continued_from": continued_from})
    if earlier is None:
        return
    checkpoint = f"{earlier.directory}@{earlier.step}"
    try:
        _take_over(earlier, directory)
    except FileNotFoundError as error:
        remedy = f"That training has just deleted {error.filename}; give the command again."
        raise UserError(_FIELD, checkpoint, remedy) from None
    except DamagedCheckpoint as error:
        others = [step for step in saved_steps(earlier.directory / CHECKPOINTS) if step != earlier.step]
        remedy = f"This checkpoint is damaged: {error}. Give another one with @STEP: the steps {others}."
        raise UserError(_FIELD, checkpoint, remedy) from None
    before = _comparable(_begun(earlier.directory / _BEGUN)["inputs"])
    changed = _differences(before, _comparable(artifact.inputs))
    print(f"train: continues {earlier.directory} after step {earlier.step} ({changed})", flush=True)


def _take_over(earlier: EarlierTraining, directory: Path) -> None:
    """Link the files of the earlier checkpoint: none is ever changed, and that training may be running."""
    checkpoints = directory / CHECKPOINTS
    partial = checkpoints / ".taken_over.partial"
    shutil.rmtree(partial, ignore_errors=True)
    state = read_checked(earlier.checkpoint / STATE)
    for file, entry in read_checked(earlier.checkpoint / MANIFEST)["files"].items():
        check_file(earlier.checkpoint / file, entry)
    shutil.copytree(earlier.checkpoint, partial, copy_function=_link)
    shutil.rmtree(checkpoints / "best", ignore_errors=True)
    if not _take_over_best(earlier, state["best_step"], checkpoints / "best"):
        state["best_step"] = None  # the first validation chooses one
    (partial / STATE).unlink()  # the link, not the earlier training's file
    write_checked(partial / STATE, state | {"continued_at": earlier.step})
    shutil.copyfile(earlier.directory / VOCAB, directory / VOCAB)
    lines = read_jsonl(earlier.directory / _METRICS)
    write_jsonl(directory / _METRICS, [line for line in lines if line["step"] <= earlier.step])
    os.replace(partial, checkpoints / earlier.checkpoint.name)


def _take_over_best(earlier: EarlierTraining, best_step: int | None, best: Path) -> bool:
    """Link the best weights up to the checkpoint; return False if a later step has replaced them."""
    theirs = earlier.directory / CHECKPOINTS / "best"
    try:
        description = read_json(theirs / BEST)
        if description["step"] != best_step:
            return False
        best.mkdir(parents=True)
        name = description["file"]
        _link(str(file_within(theirs, name, theirs / BEST)), str(best / name))
    except FileNotFoundError:
        return False
    write_json(best / BEST, description)
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


def link_results(artifacts: Mapping[Stage, Artifact], earlier: EarlierTraining | None) -> None:
    """Link the results that the earlier training's run has for this one. Rank 0 calls."""
    for stage, artifact in artifacts.items():
        here = artifact.directory
        if here.is_symlink() and not here.exists():
            here.unlink()  # that run was deleted
        if stage not in _LINKED or earlier is None or here.exists():
            continue
        there = earlier.artifacts / here.name
        if (there / "stage.json").exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(there.resolve(), here, target_is_directory=True)


def kept_vocab(config: RunConfig, earlier: EarlierTraining | None, natural_key: str) -> str | None:
    """Return the hash of the draft vocabulary that a continued training keeps; None if it has no choice.

    The draft head belongs to one vocabulary, so that other data must not change it.

    Args:
        natural_key: the name of the vocabulary's artifact if the data alone decided.
    """
    drafter = config.drafter
    if drafter.draft_vocab_size is None or drafter.init_from is not None or earlier is None:
        return None
    for artifacts in (Path(config.output_dir) / "artifacts", earlier.artifacts):
        # One that was found damaged, and is made again, has no manifest.
        if any((artifacts / natural_key / name).exists() for name in ("stage.json", "vocab.json")):
            return None
    d2t = load_tensors(earlier.directory / VOCAB)["d2t"]
    return hashlib.sha256(d2t.numpy().tobytes()).hexdigest()[:12]


def keep_vocab(artifact: Artifact, directory: Path, world: World) -> None:
    """Keep what the vocab stage made with the checkpoints, for the export and trainings that continue them.

    Raises:
        UserError: the training that this one continues has another one.
    """
    ours, kept = artifact.directory / VOCAB, directory / VOCAB
    on_main_first(world.is_main, lambda: None if kept.exists() else _copy(ours, kept))
    if not torch.equal(load_tensors(ours)["d2t"], load_tensors(kept)["d2t"]):
        raise UserError(
            "train.continue_from",
            directory,
            f"The training that this one continues has another draft vocabulary than {ours}, which was made "
            "in output_dir before. Give another output_dir.",
        )


def _copy(source: Path, copy: Path) -> None:
    partial = copy.with_name(f".{copy.name}.partial")
    shutil.copyfile(source, partial)
    os.replace(partial, copy)


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
