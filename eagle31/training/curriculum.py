"""How many speculation steps are rolled out: fewer at the start of training, where they cost less."""

from collections.abc import Iterator


def rollout_steps(step: int, num_steps: int, ramp_steps: int) -> int:
    """Return the speculation steps of an optimizer step, counted from 0: from 1 up to `num_steps`.

    The first `ramp_steps` steps are divided into `num_steps` - 1 equal phases with 1, 2, ... of them. All of
    them are rolled out afterwards. Nothing depends on what was trained before, so a resumed run is exact.
    """
    if step >= ramp_steps:
        return num_steps
    return min(num_steps, 1 + step * (num_steps - 1) // ramp_steps)


def rollout_phases(num_steps: int, ramp_fraction: float) -> Iterator[tuple[int, float]]:
    """Yield numbers of speculation steps, and the fraction of the optimizer steps that has each."""
    for depth in range(1, num_steps if ramp_fraction else 1):
        yield depth, ramp_fraction / (num_steps - 1)
    yield num_steps, 1 - ramp_fraction * (num_steps > 1)
