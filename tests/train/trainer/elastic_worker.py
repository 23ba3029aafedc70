"""Runs under torchrun: saves trainings with one number of ranks, or resumes them with another."""

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from data.batches.device_rows import DeviceRows
from data.batches.loader import RowLoader, RowPosition
from data.samples import StateShape
from eagle31.json_files import read_json
from tests.train.trainer.tiny_engines import (
    LR,
    MATRIX_LR,
    MAX_NORM,
    ROW_TOKENS,
    ROWS_PER_STEP,
    new_engine,
    random_source,
)
from train.distributed import World, gathered, leave_ranks
from train.trainer.checkpoint_files import load_weights, write_part
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.metrics import WindowSums
from train.trainer.process_groups import ensure_process_group
from train.trainer.train import optimizer_step

SAVED, STEPS = 2, 4
KINDS = ("weights", "exp_avg", "exp_avg_sq", "momentum_buffer")


class Training:
    """Two steps, or two more after a checkpoint of them."""

    def __init__(self, settings: dict[str, Any], world: World) -> None:
        self.world = world
        self.dtype = torch.bfloat16 if settings["bf16"] else torch.float32
        self.engine = new_engine(
            settings["zero_stage"],
            settings["bf16"],
            world,
            matrix_lr=MATRIX_LR if settings["muon"] else None,
        )

    def steps(self, begin: int, end: int, row: int) -> tuple[list[list[float]], int]:
        """Train; return losses and norms of the gradients, and the next row."""
        source, world, found = random_source(), self.world, []
        with closing(
            RowLoader(
                source,
                row_tokens=ROW_TOKENS,
                rows_per_step=ROWS_PER_STEP,
                rank=world.rank,
                world_size=world.size,
                seed=0,
                begin=RowPosition(begin, 0, row),
                state_shape=StateShape.of(source[0].aux_hidden_states),
            )
        ) as loader:
            rows = DeviceRows(loader, num_steps=3, device=world.device, dtype=self.dtype, stop_step=end)
            for step in range(begin, end):
                window = WindowSums(3, world.device)
                _, norm = optimizer_step(
                    self.engine, rows.of_step(step), LR, MAX_NORM, window, world, with_metrics=False
                )
                found.append([window.metrics(world)["loss"], float(norm)])
            return found, loader.position(end)[1]


def save(directory: Path, settings: dict[str, Any], world: World) -> dict[str, Any]:
    """Train two steps, save after each, and train two more before the last rank writes its second part."""
    training, saved = Training(settings, world), CheckpointDirectory(directory, 2, world)
    trained = Event()
    if world.rank < world.size - 1:
        trained.set()

    def write_late(*given: Any) -> dict[str, int]:
        assert trained.wait(60)
        return write_part(*given)

    _, row = training.steps(0, 1, 0)
    saved.save(training.engine, TrainState(1, row=row))
    _, row = training.steps(1, SAVED, row)
    with patch("train.trainer.checkpoints.write_part", write_late):
        saved.save(training.engine, state := TrainState(SAVED, row=row))
    copy = save_at_once(directory, training, state)
    losses = training.steps(SAVED, STEPS, row)[0]
    saved.finish(wait=False)
    unfinished = saved.steps()
    trained.set()
    saved.finish()
    return {"losses": losses, "unfinished": unfinished} | compare_with(copy, directory, world)


def resume(directory: Path, settings: dict[str, Any], world: World) -> dict[str, Any]:
    """Load a checkpoint, save it again, and train to the end."""
    training = Training(settings, world)
    state = CheckpointDirectory(directory, 2, world).resume(training.engine)
    found = compare_with(save_at_once(directory, training, state), directory, world)
    return found | {"step": state.step, "losses": training.steps(state.step, STEPS, state.row)[0]}


def save_at_once(directory: Path, training: Training, state: TrainState) -> Path:
    """Save into another directory, and return it."""
    copy = directory.parent / f"{directory.name}.copy"
    again = CheckpointDirectory(copy, 1, training.world)
    again.save(training.engine, state)
    again.finish()
    return copy


def compare_with(copy: Path, directory: Path, world: World) -> dict[str, Any]:
    """Return what the checkpoint has and in what it is not the copy, which is removed."""
    name = f"step-{SAVED:08d}"
    found: dict[str, Any] = {"kinds": [], "different": []}
    for kind in KINDS if world.is_main else ():
        ours, theirs = load_weights(copy / name, kind), load_weights(directory / name, kind)
        found["kinds"] += [kind] if theirs else []
        same = ours.keys() == theirs.keys() and all(torch.equal(ours[one], theirs[one]) for one in theirs)
        found["different"] += [] if same else [kind]
    if world.is_main:
        for entry in ("optimizer_steps", "weights"):
            ours, theirs = (read_json(root / name / "manifest.json")[entry] for root in (copy, directory))
            found["different"] += [] if ours == theirs else [entry]
    gathered(None, world)
    if world.is_main:
        shutil.rmtree(copy)
    return found


def main() -> None:
    """Do the tasks in the file of argv, and write what they return next to it."""
    file, world = Path(sys.argv[1]), World.from_environment()
    ensure_process_group()
    results = {}
    for name, task in read_json(file).items():
        action = {"save": save, "resume": resume}[task.pop("action")]
        results[name] = action(Path(task.pop("directory")), task, world)
    if world.is_main:
        file.with_suffix(".results.json").write_text(json.dumps(results))
    leave_ranks(world)


if __name__ == "__main__":
    main()
