"""One optimizer step of the loop, on an engine that records what is differentiated."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batches.device_rows import RowCounts
from train.distributed import World
from train.trainer import train

ACCUMULATED, NUM_RANKS = 4, 2


class Engine:
    """What the step needs of DeepSpeed's engine; a row's loss is the row itself."""

    def __init__(self, gradient_average: bool) -> None:
        self.gradient_average = gradient_average
        self.basic_optimizer = SimpleNamespace(param_groups=[])
        self.losses: list[float] = []
        self.boundaries: list[bool] = []
        self.set_gradient_accumulation_boundary = self.boundaries.append

    def gradient_accumulation_steps(self) -> int:
        return ACCUMULATED

    def __call__(self, batch: Tensor, *_: object) -> tuple[Tensor, None]:
        return batch, None

    def backward(self, loss: Tensor) -> None:
        self.losses.append(float(loss))

    def step(self) -> None: ...

    def zero_optimization(self) -> bool:
        return False

    def gradient(self) -> float:
        """Return the sum over ranks, with what DeepSpeed divides it by, of a parameter that scales losses."""
        return NUM_RANKS * sum(self.losses) / ACCUMULATED / (NUM_RANKS if self.gradient_average else 1)


@pytest.mark.parametrize("gradient_average", [True, False])
@pytest.mark.parametrize("num_supervised", [6, 0])
def test_the_gradient_is_that_of_the_mean_over_all_ranks_positions(
    gradient_average: bool, num_supervised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two ranks has two rows, with losses of 3 and 5."""
    monkeypatch.setattr(train, "clip_gradient", lambda *_: torch.ones(()))
    monkeypatch.setattr(train, "reduced_gradients", lambda engine: [])
    monkeypatch.setattr(train, "sum_over_ranks", lambda own: NUM_RANKS * own)
    engine, world = Engine(gradient_average), World(0, 0, NUM_RANKS)
    rows = [SimpleNamespace(batch=torch.tensor(loss), schedule=None) for loss in (3.0, 5.0)]
    step: Any = SimpleNamespace(counts=RowCounts(num_supervised, 9, 1), rows=iter(rows), num_rows=2)
    window: Any = SimpleNamespace(count=lambda counts: None, add=lambda *_: None)
    counts, _ = train.optimizer_step(engine, step, 0.1, 1.0, window, world, with_metrics=False)  # type: ignore[arg-type]
    assert counts.read() == [2 * num_supervised, 0, 0]
    assert engine.gradient() == pytest.approx(2 * (3 + 5) / max(1, 2 * num_supervised))
    assert engine.boundaries == [False, True]
