"""Checkpoints of a training run: the newest few, and the weights with the longest acceptance length."""

import math
import os
import shutil
from collections.abc import Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from eagle31.errors import UserError
from eagle31.tensor_files import load_tensors
from train.distributed import World, gathered, on_main_first
from train.trainer.checkpoint_files import (
    MANIFEST,
    STATE,
    DamagedCheckpoint,
    SavedFragment,
    SavedParts,
    check_file,
    check_weights,
    read_checked,
    write_checked,
    write_part,
    write_weights,
)
from train.trainer.engine_state import optimizer_steps, restore, saved_fragments, weight_shapes

CHECKPOINTS = "checkpoints"  # in the directory of a training
_PIECE = 1 << 23  # elements


@dataclass
class TrainState:
    """The loop's state outside the model engine; the rows of a step follow from the step's number."""

    step: int = 0  # optimizer steps done
    best_step: int | None = None
    best_acceptance_length: float = 0.0  # the mean over the sets that validation has
    validated_step: int | None = None  # the last step that was validated
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


class HostCopies:
    """Copies of fragments in the host's memory, which the next copies replace."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def of(self, fragments: Sequence[SavedFragment]) -> list[SavedFragment]:
        """Copy fragments, and wait until the copies are there. Long ones are divided."""
        # PyTorch rounds pinned memory up to a power of two, which a piece has.
        pieces = [
            replace(one, start=one.start + number * _PIECE, values=values)
            for one in fragments
            for number, values in enumerate(one.values.split(_PIECE))
        ]
        if [len(one) for one in self._buffers] != [len(one.values) for one in pieces]:
            self._buffers = [
                torch.empty_like(one.values, device="cpu", pin_memory=one.values.is_cuda) for one in pieces
            ]
        for buffer, piece in zip(self._buffers, pieces, strict=True):
            buffer.copy_(piece.values, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return [replace(piece, values=buffer) for buffer, piece in zip(self._buffers, pieces, strict=True)]


@dataclass(frozen=True)
class _Writing:
    """A checkpoint whose parts are being written, with what its other files will have."""

    state: TrainState
    weights: dict[str, list[int]]  # shapes
    optimizer_steps: dict[str, float]  # of this rank's weights
    part: Future[dict[str, int]]


class CheckpointDirectory:
    """A directory with `step-00000100/` for each kept checkpoint, and `best/` for the best weights.

    The best weights of the newest checkpoint stay until the next one is finished: a training that is killed
    may find others when it resumes.

    A checkpoint has a file of each rank that wrote it (`checkpoint_files.py`), and any number of ranks reads
    it. What is damaged is found by its checksum.

    One thread of each rank writes and removes its files; it takes part in no collective operation.
    """

    def __init__(self, root: Path, keep: int, world: World) -> None:
        self.root = root
        self.keep = keep
        self.world = world
        self.always_kept: int | None = None  # the step of a checkpoint that no newer one replaces
        self.saved_step = 0  # of the newest checkpoint that was loaded or begun
        self._copies, self._writer = HostCopies(), ThreadPoolExecutor(1)
        self._writing: _Writing | None = None
        self._finished_best: int | None = None  # the best step of the newest finished checkpoint

    def steps(self) -> list[int]:
        """Return the steps of the finished checkpoints, ascending."""
        return saved_steps(self.root)

    def save(self, model_engine: deepspeed.DeepSpeedEngine, state: TrainState) -> None:
        """Begin a checkpoint: copy what this rank writes, which may change at once. Every rank calls.

        The one before is finished first. A kill at any moment leaves finished ones untouched.

        Raises:
            OSError: the one before cannot be written.
        """
        self.finish()
        partial_path = self._partial(state.step)

        def prepare() -> None:
            shutil.rmtree(partial_path, ignore_errors=True)
            partial_path.mkdir(parents=True)

        on_main_first(self.world.is_main, prepare)
        copies = self._copies.of(saved_fragments(model_engine, self.world))
        self.saved_step = state.step
        self._writing = _Writing(
            replace(state),
            weight_shapes(model_engine),
            optimizer_steps(model_engine),
            self._writer.submit(write_part, partial_path / self._part_name, copies),
        )

    def finish(self, *, wait: bool = True) -> None:
        """Finish the checkpoint that was begun, if there is one. Every rank calls.

        Args:
            wait: False returns at once if a rank is still writing its part.

        Raises:
            OSError: it cannot be written.
        """
        if (writing := self._writing) is None:
            return
        part = writing.part.result() if wait or writing.part.done() else None
        written = gathered([self._part_name, part, writing.optimizer_steps], self.world)
        if any(part is None for _, part, _ in written):
            return
        manifest = {
            "files": {file: entry for file, entry, _ in written},
            "weights": writing.weights,
            "optimizer_steps": {name: step for _, _, steps in written for name, step in steps.items()},
        }
        on_main_first(self.world.is_main, lambda: self._publish(writing.state, manifest))
        self._writing = None

    def resume(self, model_engine: deepspeed.DeepSpeedEngine) -> TrainState:
        """Load the newest checkpoint that is as it was written; return a new state if there is none.

        A checkpoint that is damaged is renamed, so that the run writes it again. Without its best weights
        the state has no best step, so that the run chooses again. Every rank calls.

        Raises:
            UserError: on every rank; all checkpoints are damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(gathered(self.steps(), self.world)[0]):
            problem = next(filter(None, gathered(self._damage(self._path(step)), self.world)), None)
            if problem is None:
                on_main_first(self.world.is_main, lambda: self._set_aside(damaged))
                return self._with_best(self._load(self._path(step), model_engine))
            damaged[step] = problem
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
        """Save the weights of the best step, which are float32. Rank 0 calls."""
        assert state.best_step is not None
        path = best_path(self.root, state.best_step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_weights(path, weights)
        begun = None if self._writing is None else self._writing.state.best_step
        self._keep_best({state.best_step, begun, self._finished_best})

    def best_weights(self, step: int) -> dict[str, Tensor]:
        """Return the weights of the best step.

        Raises:
            UserError: they are missing or damaged.
        """
        path = best_path(self.root, step)
        try:
            check_weights(path)
        except DamagedCheckpoint as error:
            remedy = f"Copy it from a backup, or delete {self.root.parent / 'stage.json'}: the run's command "
            remedy += f"then validates and exports the newest checkpoint instead of step {step}."
            raise UserError("file", path, f"{error}. {remedy}") from None
        return load_tensors(path)

    def _with_best(self, state: TrainState) -> TrainState:
        """Return the state, without its best step where the weights of that are gone. Every rank calls."""
        problem = None
        if self.world.is_main and state.best_step is not None:
            try:
                check_weights(best_path(self.root, state.best_step))
            except DamagedCheckpoint as error:
                problem = str(error)
                print(f"train: the best weights are chosen again: {problem}", flush=True)
        if gathered(problem, self.world)[0] is not None:
            state = replace(state, best_step=None, best_acceptance_length=0.0)
        self._finished_best = state.best_step
        return state

    def _keep_best(self, steps: Set[int | None], after: float = math.inf) -> None:
        """Remove the best weights of other steps, apart from those after a step."""
        for file in (self.root / "best").glob("drafter-*"):
            step = file.stem.removeprefix("drafter-")
            # Not the copies that a user has made.
            if step.isdigit() and int(step) not in steps and int(step) <= after:
                file.unlink()

    def _publish(self, state: TrainState, manifest: dict[str, Any]) -> None:
        """Give a checkpoint its name once all its files are on disk, and drop those that it replaces."""
        partial_path, final = self._partial(state.step), self._path(state.step)
        write_checked(partial_path / MANIFEST, manifest)
        write_checked(partial_path / STATE, asdict(state) | {"world_size": self.world.size})
        shutil.rmtree(self._damaged(final), ignore_errors=True)
        os.replace(partial_path, final)
        sync_directory(self.root)
        self._finished_best = state.best_step
        self._keep_best({state.best_step}, after=state.step)
        for step in self.steps()[: -self.keep]:
            if step != self.always_kept:
                # Renamed first, so that nobody finds a part of it.
                os.replace(self._path(step), removed := self.root / f".step-{step:08d}.removed.partial")
                # Removing gigabytes takes seconds; what is left of them, the next start removes.
                self._writer.submit(shutil.rmtree, removed, ignore_errors=True)

    def _load(self, path: Path, model_engine: deepspeed.DeepSpeedEngine) -> TrainState:
        saved = read_checked(path / STATE)
        del saved["world_size"]
        restore(model_engine, SavedParts(path))
        state = TrainState(**saved)
        self.saved_step = state.step
        return state

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

    def _set_aside(self, damaged: dict[int, str]) -> None:
        for step, problem in damaged.items():
            print(f"train: the checkpoint of step {step} is damaged: {problem}", flush=True)
            kept = self._damaged(self._path(step))
            shutil.rmtree(kept, ignore_errors=True)
            os.replace(self._path(step), kept)

    def _damaged(self, checkpoint: Path) -> Path:
        return checkpoint.with_name(f"damaged-{checkpoint.name}")

    @property
    def _part_name(self) -> str:
        return f"part-{self.world.rank:05d}.safetensors"

    def _partial(self, step: int) -> Path:
        return self.root / f".step-{step:08d}.partial"

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"


def best_path(checkpoints: Path, step: int) -> Path:
    """Return the file of the weights of a best step; a file next to it has their checksum."""
    return checkpoints / "best" / f"drafter-{step:08d}.safetensors"


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
