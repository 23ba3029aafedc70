from itertools import pairwise

import pytest

from train.trainer.learning_rate import learning_rate

PEAK, WARMUP, STEPS = 2e-3, 10, 110


def rates(schedule: str, min_fraction: float = 0.1, warmup_steps: int = WARMUP) -> list[float]:
    """Return the rate of every step, and of one past the last."""
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
def test_warm_up_is_linear_and_starts_above_zero(schedule: str) -> None:
    expected = [PEAK * (step + 1) / WARMUP for step in range(WARMUP)]
    assert rates(schedule)[:WARMUP] == pytest.approx(expected)
    assert rates(schedule)[WARMUP] == pytest.approx(PEAK)
    assert rates(schedule, warmup_steps=0)[0] == pytest.approx(PEAK)


@pytest.mark.parametrize("min_fraction", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_rate_falls_to_the_end_value(schedule: str, min_fraction: float) -> None:
    falling = rates(schedule, min_fraction)[WARMUP:]
    assert all(before > after for before, after in pairwise(falling))
    assert falling[-1] == pytest.approx(min_fraction * PEAK)
    # In the middle both have come half the way.
    assert falling[len(falling) // 2] == pytest.approx(PEAK * (1 + min_fraction) / 2)


def test_linear_cosine_and_constant_shapes() -> None:
    linear, cosine = rates("linear")[WARMUP:], rates("cosine")[WARMUP:]
    slope = [before - after for before, after in pairwise(linear)]
    assert slope == pytest.approx([0.9 * PEAK / 100] * 100)
    # After a quarter of the steps, cos(pi / 4) of the way from -1 to 1 remains.
    assert cosine[25] == pytest.approx(PEAK * (0.1 + 0.9 * (1 + 0.5**0.5) / 2))
    assert rates("constant")[WARMUP:] == [PEAK] * 101


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 0.5), ("cosine", (1 + 0.5**0.5) / 2), ("sqrt", 1 - 0.5**0.5)]
)
def test_warmup_stable_decay_falls_at_the_end_only(shape: str, middle: float) -> None:
    options = {
        "peak": PEAK,
        "schedule": "wsd",
        "warmup_steps": WARMUP,
        "max_steps": STEPS,
        "min_fraction": 0.1,
    }
    options |= {"decay_start": 90, "decay_shape": shape}
    found = [learning_rate(step, **options) for step in range(STEPS + 1)]
    assert found[:WARMUP] == rates("constant")[:WARMUP]
    assert found[WARMUP:91] == [PEAK] * 81
    assert all(before > after for before, after in pairwise(found[90:]))
    assert found[-1] == pytest.approx(0.1 * PEAK)
    # Half of the fall for the linear and the sqrt shape, a quarter of it for the cosine.
    step = 95 if shape == "cosine" else 100
    assert found[step] == pytest.approx(PEAK * (0.1 + 0.9 * middle))
    # A decay that would begin in the warm-up begins after it.
    assert learning_rate(WARMUP, **options | {"decay_start": 3}) == pytest.approx(PEAK)


def test_run_of_warm_up_steps_only_does_not_divide_by_zero() -> None:
    options = {"peak": PEAK, "schedule": "cosine", "warmup_steps": 3, "max_steps": 3, "min_fraction": 0.0}
    assert [learning_rate(step, **options) for step in (2, 3)] == pytest.approx([PEAK, PEAK])
