"""The learning rate of each step."""

import math


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: str,
    warmup_steps: int,
    max_steps: int,
    min_fraction: float,
    decay_start: int = 0,
    decay_shape: str = "linear",
) -> float:
    """Return the rate: linear warm-up to `peak`, then the schedule's course to `min_fraction * peak`.

    Sources: warmup-stable-decay of MiniCPM (arXiv 2404.06395, section 4), and its decay by 1 - sqrt of
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (arXiv 2405.18392, section 4).

    Args:
        step: the optimizer step, from 0. The first step's rate is already above 0.
        decay_start: the first step whose rate falls, with schedule "wsd".
        decay_shape: "linear", "cosine" or "sqrt", with schedule "wsd".
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(max_steps - warmup_steps, 1)
    if schedule == "wsd":
        first = max(decay_start, warmup_steps)
        # The last step's rate is above the final one, as with the other schedules.
        progress = max(step - first, 0) / max(max_steps - first, 1)
        schedule = decay_shape
    match schedule:
        case "constant":
            return peak
        case "linear":
            shape = 1.0 - progress
        case "cosine":
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "sqrt":
            shape = 1.0 - math.sqrt(progress)
        case _:
            raise AssertionError(schedule)
    return peak * (min_fraction + (1.0 - min_fraction) * shape)
