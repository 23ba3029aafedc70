from dataclasses import replace
from itertools import pairwise

import pytest

from tests.eagle31.tiny import DSPARK, tiny_config
from train.config.training import OptimConfig, Optimizer
from train.trainer.learning_rate import LearningRate, described, rule_lr, rule_matrix_lr, with_rates

PEAK, WARMUP, STEPS = 2e-3, 10, 110
RATE = LearningRate(PEAK, "linear", WARMUP, STEPS)


def rates(schedule: str, **changes: float) -> list[float]:
    """Return the rate of every step, and of one past the last."""
    rate = replace(RATE, schedule=schedule, **changes)
    return [rate.at(step) for step in range(STEPS + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_warm_up_is_linear_and_starts_above_zero(schedule: str) -> None:
    expected = [PEAK * (step + 1) / WARMUP for step in range(WARMUP)]
    assert rates(schedule)[:WARMUP] == pytest.approx(expected)
    assert rates(schedule)[WARMUP] == pytest.approx(PEAK)
    assert rates(schedule, warmup_steps=0)[0] == pytest.approx(PEAK)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_rate_falls_to_zero(schedule: str) -> None:
    falling = rates(schedule)[WARMUP:]
    assert all(before > after for before, after in pairwise(falling))
    assert falling[-1] == pytest.approx(0)


def test_linear_and_cosine_shapes() -> None:
    linear, cosine = rates("linear")[WARMUP:], rates("cosine")[WARMUP:]
    slope = [before - after for before, after in pairwise(linear)]
    assert slope == pytest.approx([PEAK / 100] * 100)
    # After a quarter of the steps, cos(pi / 4) of the way from -1 to 1 remains.
    assert cosine[25] == pytest.approx(PEAK * (1 + 0.5**0.5) / 2)


def test_warmup_stable_decay_falls_at_the_end_only() -> None:
    found = rates("wsd", decay_start=90)
    assert found[WARMUP:91] == [PEAK] * 81
    slope = [before - after for before, after in pairwise(found[90:])]
    assert slope == pytest.approx([PEAK / 20] * 20)
    # A decay that would begin in the warm-up begins after it.
    assert rates("wsd", decay_start=3)[WARMUP] == pytest.approx(PEAK)


@pytest.mark.parametrize(
    ("hidden_size", "layers", "lr", "matrix_lr"), [(4096, 1, 0.4 / 4096, 0.03), (1024, 4, 0.2 / 1024, 0.015)]
)
def test_the_rule_falls_with_the_width_and_with_the_root_of_the_depth(
    hidden_size: int, layers: int, lr: float, matrix_lr: float
) -> None:
    drafter = tiny_config(hidden_size=hidden_size, num_hidden_layers=layers)
    assert (rule_lr(drafter), rule_matrix_lr(drafter)) == pytest.approx((lr, matrix_lr))


def test_the_rate_of_dspark_is_the_published_one() -> None:
    assert rule_lr(tiny_config(**DSPARK | {"hidden_size": 4096})) == pytest.approx(6e-4, rel=0.03)


def test_a_rate_that_is_given_is_kept() -> None:
    drafter = tiny_config()  # 16 wide
    assert with_rates(OptimConfig(), drafter) == OptimConfig(lr=0.025, matrix_lr=0.03)
    given = OptimConfig(name=Optimizer.muon, lr=3e-3)
    complete = with_rates(given, drafter)
    assert (complete.lr, complete.matrix_lr) == (3e-3, 0.03)
    assert described(given, drafter) == "muon, lr 0.003, matrix_lr 0.03 (rule)"
    assert described(complete, drafter) == "muon, lr 0.003, matrix_lr 0.03"
    assert with_rates(OptimConfig(matrix_lr=0.1), drafter).matrix_lr == 0.1
    assert described(OptimConfig(name=Optimizer.adamw), drafter) == "adamw, lr 0.025 (rule)"
