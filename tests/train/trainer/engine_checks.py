"""What the workers check of a model engine: skipped steps change nothing, others are orthogonal."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from data.batches.device_rows import StepRows
from tests.train.trainer.tiny_engines import LR, MUON
from train.distributed import World
from train.trainer.engine import full_state
from train.trainer.engine_state import master_weights
from train.trainer.loop import optimizer_step
from train.trainer.matrices import is_matrix
from train.trainer.metrics import WindowSums


def snapshot(model_engine: Any) -> list[Tensor]:
    """Copies of the float32 weights and of this rank's optimizer states."""
    states = map(model_engine.basic_optimizer.state.__getitem__, master_weights(model_engine))
    copies = [state[name].clone() for state in states for name in sorted(state)]
    return [*full_state(model_engine, keep=True).values(), *copies]


def refused_steps(model_engine: Any, step: StepRows, world: World) -> dict:
    """A step with NaN on the last rank, which must change nothing, and one that is taken."""
    rows = list(step.rows)
    damaged = list(rows)
    if world.rank == world.size - 1:
        batch = rows[0].batch
        damaged[0] = replace(
            rows[0], batch=replace(batch, final_hidden_states=batch.final_hidden_states * torch.nan)
        )
    found: dict[str, Any] = {}
    before = snapshot(model_engine)
    for name, some in {"damaged": damaged, "sound": rows}.items():
        weights = full_state(model_engine, keep=True)
        window, one = WindowSums(3, world.device), replace(step, rows=iter(some))
        optimizer_step(model_engine, one, LR, window, world, with_metrics=False)
        unchanged = all(map(torch.equal, before, snapshot(model_engine)))
        found[name] = {"refused": bool(model_engine.basic_optimizer.refused), "unchanged": unchanged}
        found["singular values"] = singular_values(weights, full_state(model_engine, keep=True))
    return found


def singular_values(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, list[float]]:
    """Smallest and largest singular value of each matrix's update, by its rate and scale, by name."""
    found = {}
    for name, old in before.items():
        if is_matrix(name, old.shape):
            scale = MUON.matrix_lr * max(1, old.shape[0] / old.shape[1]) ** 0.5
            values = torch.linalg.svdvals((old - after[name]) / scale)
            found[name] = [float(values.min()), float(values.max())]
    return found
