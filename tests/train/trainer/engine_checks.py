"""What the workers check of a model engine: refused steps change nothing, and the average has its formula."""

from dataclasses import asdict, replace
from typing import Any

import deepspeed
import torch
from torch import Tensor

from data.batches.device_rows import StepRows
from tests.train.trainer.tiny_engines import LR, MUON
from train.checkpoint.engine_state import master_weights
from train.distributed import World
from train.optim.matrices import is_matrix
from train.trainer.average import WeightAverage
from train.trainer.guard import StepGuard
from train.trainer.loop import optimizer_step
from train.trainer.model_engine import full_state
from train.trainer.window import WindowSums

EMA_DECAY = 0.2  # above the smaller values of the first steps


def snapshot(model_engine: Any) -> list[Tensor]:
    """Copies of the float32 weights and of this rank's optimizer states."""
    states = map(model_engine.basic_optimizer.state.__getitem__, master_weights(model_engine))
    copies = [state[name].clone() for state in states for name in sorted(state)]
    return [*full_state(model_engine, keep=True).values(), *copies]


def computed_with(model_engine: Any) -> list[Tensor]:
    """Copies of the weights that the forward pass reads."""
    found = []
    for parameter in model_engine.module.drafter.parameters():
        with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
            found.append(parameter.detach().clone().cpu())
    return found


def refused_steps(model_engine: Any, step: StepRows, world: World) -> dict:
    """Steps with NaN on the last rank, with a norm beyond the bound, and one that is taken.

    Those that are refused must change nothing. The one that is taken must have orthogonal updates under Muon.
    """
    guard: StepGuard = model_engine.basic_optimizer.guard
    rows = list(step.rows)
    damaged = list(rows)
    if world.rank == world.size - 1:
        batch = rows[0].batch
        damaged[0] = replace(
            rows[0], batch=replace(batch, final_hidden_states=batch.final_hidden_states * torch.nan)
        )
    found: dict[str, Any] = {}
    before = snapshot(model_engine)
    for number, (some, bound) in enumerate([(damaged, None), (rows, 1e-3), (rows, 1e3)]):
        guard.max_norm_jump = bound
        weights = full_state(model_engine, keep=True)
        window, one = WindowSums(3, world.device), replace(step, rows=iter(some))
        optimizer_step(model_engine, one, LR, window, world, with_metrics=False)
        guard.record(number)
        after = snapshot(model_engine)
        found[f"unchanged {number}"] = all(map(torch.equal, before, after))
        found["singular values"] = singular_values(weights, full_state(model_engine, keep=True))
    return found | {"skipped": [asdict(one) for one in guard.collect(wait=True)]}


def singular_values(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, list[float]]:
    """Smallest and largest singular value of each matrix's update, by its rate and scale, by name."""
    found = {}
    for name, old in before.items():
        if is_matrix(name, old.shape):
            scale = MUON.matrix_lr * max(1, old.shape[0] / old.shape[1]) ** 0.5
            values = torch.linalg.svdvals((old - after[name]) / scale)
            found[name] = [float(values.min()), float(values.max())]
    return found


class CheckedAverage:
    """The average of an engine's weights, and what it has to be by the formula, from the full weights."""

    def __init__(self, model_engine: Any) -> None:
        self.model_engine = model_engine
        self.average = WeightAverage(model_engine, EMA_DECAY)
        self.expected: dict[str, Tensor] = {}

    def update(self) -> None:
        n = self.average.num_updates
        share = 1 - min(EMA_DECAY, (1 + n) / (10 + n))
        for name, weight in full_state(self.model_engine, keep=True).items():
            before = self.expected.get(name, weight)
            self.expected[name] = before + share * (weight - before)
        self.average.update(torch.tensor(False))

    def check(self) -> dict[str, float]:
        """Check that the engine has the averages within the context alone; return their sums."""
        before = [*snapshot(self.model_engine), *computed_with(self.model_engine)]
        with self.average.in_place_of_weights():
            held = full_state(self.model_engine, keep=True)
            used = computed_with(self.model_engine)
        after = [*snapshot(self.model_engine), *computed_with(self.model_engine)]
        assert all(map(torch.equal, before, after))
        for (name, weight), one in zip(held.items(), used, strict=True):
            torch.testing.assert_close(weight, self.expected[name], rtol=1e-5, atol=1e-7)
            assert torch.equal(weight.to(one.dtype), one), name
        assert not all(map(torch.equal, used, computed_with(self.model_engine)))
        states = self.average.averages
        kept = [one.clone() for one in states]
        self.average.update(torch.tensor(True))
        assert all(map(torch.equal, kept, states))
        self.average.num_updates -= 1
        return {name: value.double().sum().item() for name, value in held.items()}
