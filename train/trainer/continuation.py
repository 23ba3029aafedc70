"""Continuing an earlier training: finding its checkpoints, and taking one over into a new directory."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle31.errors import UserError
from eagle31.json_files import expecting, file_within, read_json, read_jsonl, write_json, write_jsonl
from train.artifact import MANIFEST as FINISHED
from train.trainer.checkpoints import BEST, saved_steps
from train.trainer.parts import MANIFEST, STATE, DamagedCheckpoint, check_file, read_checked, write_checked

BEGUN = "begun.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
VOCAB = "vocab.safetensors"
KEY = "train.continue_from"
CONTINUED = "continued"  # the input of a training that continues another
_SHOWN = 6  # settings that a message names


@dataclass(frozen=True)
class EarlierTraining:
    """A checkpoint of an earlier training, from which another one continues."""

    directory: Path  # that of the train stage
    step: int

    @property
    def inputs(self) -> dict[str, Any]:
        """What the training depended on."""
        return _description(self.directory / BEGUN)["inputs"]

    @property
    def checkpoint(self) -> Path:
        return self.directory / CHECKPOINTS / f"step-{self.step:08d}"

    @property
    def artifacts(self) -> Path:
        """The directory with the results of all stages of its run."""
        return self.directory.parent

    def to_input(self) -> dict[str, Any]:
        """Return what the result of a training that continues this one depends on."""
        return {"training": self.directory.name, "step": self.step}

    def to_json(self) -> dict[str, Any]:
        return {"directory": str(self.directory), "step": self.step}

    @staticmethod
    def from_json(values: dict[str, Any]) -> "EarlierTraining":
        return EarlierTraining(Path(values["directory"]), values["step"])


def parse_origin(value: str) -> tuple[Path, int | None]:
    """Return directory and step of `DIRECTORY` or `DIRECTORY@STEP`; None is the newest checkpoint."""
    directory, separator, step = value.rpartition("@")
    return (Path(directory), int(step)) if separator and step.isdigit() else (Path(value), None)


def find_earlier(
    output_dir: Path, step: int | None, fixed: dict[str, Any], *, named: bool
) -> EarlierTraining | None:
    """Return the newest training in an output directory that has the same fixed settings.

    Args:
        step: of the checkpoint; None for the newest.
        fixed: the settings that must not change when a training is continued.
        named: whether the user named the directory.

    Raises:
        UserError: all trainings there have other fixed settings; or the directory that the user named has
            no such checkpoint.
    """
    trainings = sorted(_trainings(output_dir), key=lambda one: _newest_time(one), reverse=True)
    if not trainings:
        if named:
            raise UserError(KEY, output_dir, "No training there has a checkpoint yet; give an output_dir.")
        return None
    same = [one for one in trainings if _fixed(one) == fixed]
    if not same:
        shown = differences(_fixed(trainings[0]), fixed)
        raise UserError(
            KEY,
            output_dir if named else "auto",
            f"The training in {trainings[0]} cannot be continued with other settings of these: {shown}."
            + (" Use its settings." if named else ""),
        )
    for one in same:
        steps = saved_steps(one / CHECKPOINTS)
        if step is None or step in steps:
            return EarlierTraining(one, steps[-1] if step is None else step)
    raise UserError(
        KEY,
        f"{output_dir}@{step}",
        f"The checkpoints there are of steps {saved_steps(same[0] / CHECKPOINTS)}.",
    )


@dataclass(frozen=True)
class BegunTraining:
    """A training that has been begun."""

    continued: EarlierTraining | None  # what it continues

    def is_from(self, path: Path, step: int | None) -> bool:
        """Return whether it continues a training in this output directory, or this training.

        Args:
            step: that after which it continues; None for any.
        """
        if self.continued is None or step not in (None, self.continued.step):
            return False
        training = self.continued.directory.resolve()
        return path.resolve() in (training, training.parent.parent)


def begun_trainings(output_dir: Path, inputs: dict[str, Any]) -> list[BegunTraining]:
    """Return the trainings in an output directory with these inputs, whatever they continue, newest first."""
    wanted = _comparable(json.loads(json.dumps(inputs)))
    paths = [
        path
        for path in output_dir.glob(f"artifacts/train-*/{BEGUN}")
        if saved_steps(path.parent / CHECKPOINTS) or (path.parent / FINISHED).exists()
    ]
    found = []
    for description in map(_description, sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)):
        if _comparable(description["inputs"]) == wanted:
            continued = description["continued_from"]
            continued = continued and EarlierTraining.from_json(continued)
            found.append(BegunTraining(continued))
    return found


def check_steps(earlier: EarlierTraining, max_steps: int | None, inputs: dict[str, Any]) -> None:
    """Raise UserError if no step is left to train."""
    if max_steps is not None and earlier.step >= max_steps:
        changed = differences(_comparable(earlier.inputs), _comparable(inputs))
        raise UserError(
            "train.max_steps",
            max_steps,
            f"The training in {earlier.directory} is at step {earlier.step} already, with other settings "
            f"({changed}). Give more steps to continue it, {KEY}=DIRECTORY@STEP for an earlier checkpoint of "
            f"it, or {KEY}=none to start at the first step.",
        )


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
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


def begin(directory: Path, inputs: dict[str, Any], earlier: EarlierTraining | None) -> bool:
    """Prepare the directory of a training, and return whether it now continues an earlier one.

    A directory that has a checkpoint stays as it is. The files of the earlier training's checkpoint are
    linked, because no file of a checkpoint is ever changed; the earlier training may be running.

    Raises:
        UserError: the earlier training deleted the checkpoint in the meantime, or it is damaged.
    """
    if saved_steps(directory / CHECKPOINTS):
        return False
    description: dict[str, Any] = {"inputs": inputs, "continued_from": None}
    if earlier is None:
        write_json(directory / BEGUN, description)
        return False
    write_json(directory / BEGUN, description | {"continued_from": earlier.to_json()})
    try:
        _take_over(earlier, directory)
    except FileNotFoundError as error:
        remedy = f"That training has just deleted {error.filename}; give the command again."
        raise UserError(KEY, f"{earlier.directory}@{earlier.step}", remedy) from None
    except DamagedCheckpoint as error:
        others = [step for step in saved_steps(earlier.directory / CHECKPOINTS) if step != earlier.step]
        remedy = f"This checkpoint is damaged: {error}. Give another one with @STEP: the steps {others}."
        raise UserError(KEY, f"{earlier.directory}@{earlier.step}", remedy) from None
    return True


def _take_over(earlier: EarlierTraining, directory: Path) -> None:
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
    lines = read_jsonl(earlier.directory / METRICS)
    write_jsonl(directory / METRICS, [line for line in lines if line["step"] <= earlier.step])
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


def _trainings(output_dir: Path) -> Iterator[Path]:
    """Yield the directories of trainings with a checkpoint: those of a run, or the one that is named."""
    for directory in (output_dir, *output_dir.glob("artifacts/train-*")):
        if (directory / BEGUN).exists() and saved_steps(directory / CHECKPOINTS):
            yield directory


def _fixed(directory: Path) -> dict[str, Any]:
    """Return the settings of a training that a continuation keeps."""
    return _description(directory / BEGUN)["inputs"]["fixed"]


def _description(path: Path) -> dict[str, Any]:
    """Return what `begin` wrote.

    Raises:
        UserError: the file is damaged.
    """
    with expecting(path, "the description of a training"):
        content = read_json(path)
        if not isinstance(content["inputs"]["fixed"], dict):
            raise TypeError("its settings are no object")
        if content["continued_from"] is not None:
            EarlierTraining.from_json(content["continued_from"])
        return content


def _comparable(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a training without what it continues."""
    return {name: value for name, value in inputs.items() if name != CONTINUED}


def _newest_time(directory: Path) -> float:
    return max(path.stat().st_mtime for path in directory.glob(f"{CHECKPOINTS}/step-*"))


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
