"""Checkpoints of a training run: the newest few, and the weights with the longest acceptance length."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
from torch import Tensor

from eagle31.errors import UserError
from eagle31.json_files import expecting, file_within, read_json, write_json
from eagle31.tensor_files import load_tensors
from train.distributed import World, agreed, agreed_on_main, gathered
from train.trainer.engine_state import optimizer_steps, restore, saved_fragments, weight_shapes
from train.trainer.parts import (
    MANIFEST,
    STATE,
    DamagedCheckpoint,
    SavedParts,
    check_file,
    part_bytes,
    read_checked,
    write_checked,
    write_part,
    write_weights,
)

CHECKPOINTS = "checkpoints"  # in the directory of a training
BEST = "best.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPARE_BYTES = 1 << 20  # for the files of JSON, and what a file system needs for its directories


@dataclass
class TrainState:
    """The loop's state outside the model engine; the rows of a step follow from the step's number."""

    step: int = 0  # optimizer steps done
    best_step: int | None = None
    best_acceptance_length: float = 0.0  # the mean over the sets that validation has
    supervised_positions: int = 0  # trained on so far, over all ranks
    step_seconds: float = 0.0  # of the steps and their waits for data, up to the last record of metrics
    skipped_steps: int = 0
    # The next row in the data's order: its epoch, and its index in the epoch. See `RowPosition`.
    epoch: int = 0
    row: int = 0
    first_epoch: int = 0  # the first epoch in this order
    order: str | None = None  # fingerprint of what the order depends on
    validated_on: str | None = None  # fingerprint of what `best_acceptance_length` depends on
    continued_at: int = 0  # the step after which this directory's training continues an earlier one


class CheckpointDirectory:
    """A directory with `step-00000100/` for each kept checkpoint, and `best/` for the best weights.

    A checkpoint has a file of each rank that wrote it, in the form of `train.trainer.parts`, and any
    number of ranks reads it. What is damaged is found by its checksum.
    """

    def __init__(self, root: Path, keep: int, world: World) -> None:
        self.root = root
        self.keep = keep
        self.world = world
        self.always_kept: int | None = None  # the step of a checkpoint that no newer one replaces

    def steps(self) -> list[int]:
        """Return the steps of the finished checkpoints, ascending."""
        return saved_steps(self.root)

    def save(self, model_engine: deepspeed.DeepSpeedEngine, state: TrainState) -> None:
        """Write a checkpoint; a kill at any moment leaves the earlier ones untouched. Every rank calls.

        Raises:
            UserError: on every rank; some rank cannot write its part. The earlier checkpoints stay.
        """
        fragments = saved_fragments(model_engine, self.world)
        num_bytes = sum(gathered(part_bytes(fragments), self.world)) + _SPARE_BYTES
        final, partial_path = self._path(state.step), self.root / f".step-{state.step:08d}.partial"
        fails = partial(self._cannot_write, state.step, num_bytes)
        if not agreed_on_main(self.world, lambda: self._prepare(final, partial_path, num_bytes), fails):
            return
        name = f"part-{self.world.rank:05d}.safetensors"

        def write() -> list[Any]:
            return [name, write_part(partial_path / name, fragments), optimizer_steps(model_engine)]

        def publish() -> None:
            write_checked(partial_path / MANIFEST, manifest)
            write_checked(partial_path / STATE, asdict(state) | {"world_size": self.world.size})
            shutil.rmtree(self._damaged(final), ignore_errors=True)
            os.replace(partial_path, final)
            sync_directory(self.root)
            for step in self.steps()[: -self.keep]:
                if step != self.always_kept:
                    # Renamed first, so that nobody finds a part of it.
                    os.replace(self._path(step), removed := self.root / f".step-{step:08d}.removed.partial")
                    shutil.rmtree(removed)

        try:
            written = agreed(self.world, write, fails)
            manifest = {
                "files": {file: entry for file, entry, _ in written},
                "weights": weight_shapes(model_engine),
                "optimizer_steps": {name: step for _, _, steps in written for name, step in steps.items()},
            }
            agreed_on_main(self.world, publish, fails)
        except UserError:
            if self.world.is_main:
                shutil.rmtree(partial_path, ignore_errors=True)  # what fills the disk
            raise

    def resume(self, model_engine: deepspeed.DeepSpeedEngine) -> TrainState:
        """Load the newest checkpoint that is as it was written; return a new state if there is none.

        A checkpoint that is damaged is renamed, so that the run writes it again. Every rank calls.

        Raises:
            UserError: on every rank; all checkpoints are damaged.
        """
        steps = agreed_on_main(self.world, self.steps, self._cannot_read)
        damaged: dict[int, str] = {}
        for step in reversed(steps):
            path = self._path(step)
            problems = gathered(self._damage(path), self.world)
            if any(problems):
                damaged[step] = next(problem for problem in problems if problem)
                continue
            if damaged:
                agreed_on_main(self.world, lambda: self._set_aside(damaged, step), self._cannot_write_any)  # noqa: B023
            return self._load(path, model_engine)
        if damaged:
            raise UserError(
                "output_dir",
                self.root,
                f"Every checkpoint of this training is damaged: {'; '.join(damaged.values())}. Copy one from "
                "a backup, or delete that directory to start at the first step.",
            )
        return TrainState()

    def newest(self) -> str:
        """Return where the newest checkpoint is, for a message."""
        steps = self.steps()
        return f"the newest checkpoint is {self._path(steps[-1])}" if steps else "there is no checkpoint yet"

    def save_best(self, weights: dict[str, Tensor], state: TrainState) -> None:
        """Replace the best weights, which are float32. Every rank calls; rank 0 has and writes them.

        Raises:
            UserError: on every rank; they cannot be written. Those of before are as they were.
        """
        best = self.root / "best"
        file = f"drafter-{state.step:08d}.safetensors"

        def write() -> None:
            best.mkdir(parents=True, exist_ok=True)
            _replace(best / file, partial(write_weights, weights=weights))
            length = state.best_acceptance_length
            write_json(best / BEST, {"step": state.step, "acceptance_length": length, "file": file})
            for other in best.glob("*.safetensors"):
                if other.name != file:
                    other.unlink()

        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        agreed_on_main(self.world, write, partial(self._cannot_write, state.step, num_bytes))

    def best_weights(self) -> tuple[dict[str, Tensor], dict]:
        """Return the best weights, and their step and acceptance_length."""
        best, path = self.root / "best", self.root / "best" / BEST
        with expecting(path, "the description of the best weights"):
            description = read_json(path)
            return load_tensors(file_within(best, description["file"], path)), description

    def _prepare(self, final: Path, partial_path: Path, num_bytes: int) -> bool:
        """Make the directory to write into; return whether the checkpoint has to be written."""
        if final.exists():
            return False
        for unfinished in self.root.glob(".step-*"):  # that a killed run has left
            shutil.rmtree(unfinished, ignore_errors=True)
        partial_path.mkdir(parents=True)
        if shutil.disk_usage(self.root).free < num_bytes:
            partial_path.rmdir()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root))
        return True

    def _load(self, path: Path, model_engine: deepspeed.DeepSpeedEngine) -> TrainState:
        saved = read_checked(path / STATE)
        del saved["world_size"]
        restore(model_engine, SavedParts(path))
        return TrainState(**saved)

    def _damage(self, path: Path) -> str | None:
        """Return what is wrong with the files that this rank checks: an equal share of them."""
        try:
            read_checked(path / STATE)
            files = sorted(read_checked(path / MANIFEST)["files"].items())
            for name, entry in files[self.world.rank :: self.world.size]:
                check_file(path / name, entry)
        except DamagedCheckpoint as error:
            return str(error)
        return None

    def _set_aside(self, damaged: dict[int, str], used: int) -> None:
        for step, problem in damaged.items():
            print(f"train: the checkpoint of step {step} is damaged: {problem}", flush=True)
            kept = self._damaged(self._path(step))
            shutil.rmtree(kept, ignore_errors=True)
            os.replace(self._path(step), kept)
        print(f"train: using the checkpoint of step {used} instead", flush=True)

    def _cannot_write(self, step: int, num_bytes: int, error: OSError) -> UserError:
        """Return the error for the user, with the space that is needed and the space that is free."""
        kept = [one for one in self.steps() if one != step]
        left = f"The checkpoint of step {kept[-1]} is kept" if kept else "There is no earlier checkpoint"
        if error.errno not in _FULL:
            remedy = f"What is saved at step {step} cannot be written ({error}). {left}."
            return UserError("output_dir", self.root, f"{remedy} Correct this; the same command resumes.")
        free = shutil.disk_usage(self.root).free
        return UserError(
            "output_dir",
            self.root,
            f"What is saved at step {step} needs {_size(num_bytes)}, and {_size(free)} are free there"
            f"{', but not to this account' if free >= num_bytes else ''} (the {self.keep} of "
            f"train.keep_checkpoints and the new one are there at a time). {left}. Free some space; the same "
            "command then resumes.",
        )

    def _cannot_write_any(self, error: OSError) -> UserError:
        return UserError("output_dir", self.root, f"It cannot be written: {error}.")

    def _cannot_read(self, error: OSError) -> UserError:
        return UserError("output_dir", self.root, f"It cannot be read: {error}.")

    def _damaged(self, checkpoint: Path) -> Path:
        return checkpoint.with_name(f"damaged-{checkpoint.name}")

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Return the steps of the finished checkpoints in a directory, ascending."""
    # A directory gets its name once all its files are on disk.
    names = (path.name.removeprefix("step-") for path in checkpoints.glob("step-*"))
    return sorted(int(name) for name in names if name.isdigit())  # not the copies that a user has made


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` write a file, which appears once it is on disk."""
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
