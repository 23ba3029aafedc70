"""Checkpoints of a training run: the newest few, and the weights with the longest acceptance length."""

import io
import os
import shutil
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from eagle31.json_files import read_json, write_json
from eagle31.tensor_files import load_pickled, load_tensors
from train.distributed import World, on_main_first
from train.trainer.average import WeightAverage

STATE = "state.json"
ENGINE_TAG = "engine"
WEIGHTS = "weights"
BEST = "best.json"


@dataclass
class TrainState:
    """The loop's state outside the model engine; the rows of a step follow from the step's number."""

    step: int = 0  # optimizer steps done
    best_step: int | None = None
    best_acceptance_length: float = 0.0  # the mean over the sets that validation has
    validations_since_best: int = 0  # in a row, that were not better than the best one
    supervised_positions: int = 0  # trained on so far, over all ranks
    step_seconds: float = 0.0  # of the steps and their waits for data, up to the last record of metrics
    skipped_steps: int = 0
    grad_norm_reference: float | None = None  # see StepGuard.reference
    # The next row in the data's order: its epoch, and its index in the epoch. See `RowPosition`.
    epoch: int = 0
    row: int = 0
    first_epoch: int = 0  # the first epoch in this order
    order: str | None = None  # fingerprint of what the order depends on
    validated_on: str | None = None  # fingerprint of what `best_acceptance_length` depends on
    continued_at: int = 0  # the step after which this directory's training continues an earlier one


class CheckpointDirectory:
    """A directory with `step-00000100/` for each kept checkpoint, and `best/` for the best weights."""

    def __init__(self, root: Path, keep: int, world: World) -> None:
        self.root = root
        self.keep = keep
        self.world = world
        self.always_kept: int | None = None  # the step of a checkpoint that no newer one replaces

    def steps(self) -> list[int]:
        """Return the steps of the finished checkpoints, ascending."""
        found = self.root.glob(f"step-*/{STATE}")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def save(
        self,
        model_engine: deepspeed.DeepSpeedEngine,
        state: TrainState,
        average: WeightAverage | None = None,
    ) -> None:
        """Writes a checkpoint; a kill at any moment leaves the earlier ones untouched. Every rank calls."""
        final = self._path(state.step)
        if final.exists():
            return
        partial = self.root / f".step-{state.step:08d}.partial"
        on_main_first(self.world.is_main, lambda: _empty(partial))
        model_engine.save_checkpoint(str(partial), tag=ENGINE_TAG)
        if average is not None:
            torch.save(average.state(), self._average_path(partial))
        # Each rank syncs the files that it wrote: they must be on disk before the rename publishes them.
        _sync_files(partial)
        if dist.is_initialized():
            dist.barrier()

        def publish() -> None:
            write_json(partial / STATE, asdict(state) | {"world_size": self.world.size})
            os.replace(partial, final)
            for step in self.steps()[: -self.keep]:
                if step != self.always_kept:
                    shutil.rmtree(self._path(step))

        on_main_first(self.world.is_main, publish)

    def resume(
        self, model_engine: deepspeed.DeepSpeedEngine, average: WeightAverage | None = None
    ) -> TrainState:
        """Loads the newest checkpoint; returns a new state if there is none. Every rank calls.

        The average is loaded if the checkpoint has one, and begins with the next step otherwise.
        """
        steps = self.steps()
        if not steps:
            return TrainState()
        path = self._path(steps[-1])
        saved = read_json(path / STATE)
        saved.pop("world_size")
        with redirect_stdout(io.StringIO()):  # DeepSpeed's optimizer for bf16 prints what it loads
            loaded, _ = model_engine.load_checkpoint(str(path), tag=ENGINE_TAG)
        assert loaded is not None, path
        if average is not None and self._average_path(path).exists():
            average.load(load_pickled(self._average_path(path)))
        return TrainState(**saved)

    def newest(self) -> str:
        """Return where the newest checkpoint is, for a message."""
        steps = self.steps()
        return f"the newest checkpoint is {self._path(steps[-1])}" if steps else "there is no checkpoint yet"

    def saved_world_size(self) -> int | None:
        """Return the number of ranks that wrote the newest checkpoint."""
        steps = self.steps()
        return read_json(self._path(steps[-1]) / STATE)["world_size"] if steps else None

    def save_best(self, weights: dict[str, dict[str, Tensor]], state: TrainState) -> None:
        """Replaces the best weights, which are float32. Rank 0 calls.

        Args:
            weights: those that were chosen, as "drafter", and if these are averages the "plain" ones too.
        """
        best = self.root / "best"
        best.mkdir(parents=True, exist_ok=True)
        files = {kind: f"{kind}-{state.step:08d}.safetensors" for kind in weights}
        for kind, name in files.items():
            partial = best / f".{name}.partial"
            save_file(weights[kind], partial)
            os.replace(partial, best / name)
        description = {"step": state.step, "acceptance_length": state.best_acceptance_length, "files": files}
        write_json(best / BEST, description)
        for other in best.glob("*.safetensors"):
            if other.name not in files.values():
                other.unlink()

    def keep_weights(self, weights: dict[str, Tensor], state: TrainState) -> None:
        """Write the weights, which are float32, into `weights/`. Rank 0 calls.

        The file's metadata has the step, and the step seconds and supervised positions that it took.
        """
        kept = self.root / WEIGHTS
        kept.mkdir(parents=True, exist_ok=True)
        name = f"drafter-{state.step:08d}.safetensors"
        fields = ("step", "step_seconds", "supervised_positions")
        partial = kept / f".{name}.partial"
        save_file(weights, partial, metadata={field: str(getattr(state, field)) for field in fields})
        os.replace(partial, kept / name)

    def best_weights(self, *, averaged: bool = True) -> tuple[dict[str, Tensor], dict]:
        """Return the best weights, and their step and acceptance_length.

        Args:
            averaged: False returns the weights before averaging; without an average there are no others.
        """
        description = read_json(self.root / "best" / BEST)
        files = description["files"]
        name = files["drafter"] if averaged else files.get("plain", files["drafter"])
        return load_tensors(self.root / "best" / name), description

    def _average_path(self, checkpoint: Path) -> Path:
        return checkpoint / f"average-{self.world.rank:05d}.pt"

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _sync_files(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
