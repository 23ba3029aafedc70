from itertools import pairwise

import pytest

from train.trainer.learning_rate import learning_rate

PEAK, WARMUP, STEPS = 2e-3, 10, 110


def rates(schedule: str, min_fraction: float = 0.1, warmup_steps: int = WARMUP) -> list[float]:
    """Of every step, and of the one behind the last."""
    return [
        learning_rate(
            step,
            peak=PEAK,
            schedule=schedule,
            warmup_steps=warmup_steps,
            max_steps=STEPS,
            min_fraction=min_fraction,
        )
        for step in range(STEPS + 1)
    ]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_and_moves_at_the_first_step(schedule: str) -> None:
    wanted = [PEAK * (step + 1) / WARMUP for step in range(WARMUP)]
    assert rates(schedule)[:WARMUP] == pytest.approx(wanted)
    assert rates(schedule)[WARMUP] == pytest.approx(PEAK)
    assert rates(schedule, warmup_steps=0)[0] == pytest.approx(PEAK)


@pytest.mark.parametrize("min_fraction", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_it_falls_all_the_way_to_the_end_value(schedule: str, min_fraction: float) -> None:
    falling = rates(schedule, min_fraction)[WARMUP:]
    assert all(before > after for before, after in pairwise(falling))
    assert falling[-1] == pytest.approx(min_fraction * PEAK)
    # Both are half-way in the middle.
    assert falling[len(falling) // 2] == pytest.approx(PEAK * (1 + min_fraction) / 2)


def test_shapes() -> None:
    linear, cosine = rates("linear")[WARMUP:], rates("cosine")[WARMUP:]
    slope = [before - after for before, after in pairwise(linear)]
    assert slope == pytest.approx([0.9 * PEAK / 100] * 100)
    # A quarter on the way, cos(pi / 4) is left of the way from -1 to 1.
    assert cosine[25] == pytest.approx(PEAK * (0.1 + 0.9 * (1 + 0.5**0.5) / 2))
    assert rates("constant")[WARMUP:] == [PEAK] * 101


def test_a_run_that_is_all_warm_up_has_no_division_by_zero() -> None:
    options = {"peak": PEAK, "schedule": "cosine", "warmup_steps": 3, "max_steps": 3, "min_fraction": 0.0}
    assert [learning_rate(step, **options) for step in (2, 3)] == pytest.approx([PEAK, PEAK])
