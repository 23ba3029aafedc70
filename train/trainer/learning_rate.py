"""Learning rate by step."""

import math


def learning_rate(
    step: int, *, peak: float, schedule: str, warmup_steps: int, max_steps: int, min_fraction: float
) -> float:
    """Linear warm-up from 0 to `peak`, then cosine, linear or constant towards `min_fraction * peak`.

    `step` counts optimizer steps from 0; the first one already moves.
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
