"""The learning rate of each step."""

import math


def learning_rate(
    step: int, *, peak: float, schedule: str, warmup_steps: int, max_steps: int, min_fraction: float
) -> float:
    """Return the rate: linear warm-up to `peak`, then cosine, linear or constant to `min_fraction * peak`.

    `step` counts optimizer steps from 0. The first step's rate is already above 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(max_steps - warmup_steps, 1)
    match schedule:
        case "constant":
            return peak
        case "linear":
            shape = 1.0 - progress
        case "cosine":
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise AssertionError(schedule)
    return peak * (min_fraction + (1.0 - min_fraction) * shape)
