"""The learning rate of each step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """A linear warm-up to `peak`, then the schedule's course to `min_fraction * peak`.

    Source: warmup-stable-decay of MiniCPM (arXiv 2404.06395, section 4).

    Args:
        schedule: "constant", "linear", "cosine" or "wsd".
        decay_start: the first step whose rate falls, with schedule "wsd".
    """

    peak: float
    schedule: str
    warmup_steps: int
    max_steps: int
    min_fraction: float
    decay_start: int = 0

    def at(self, step: int) -> float:
        """Return the rate of an optimizer step, from 0. The first step's rate is already above 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        first = self.warmup_steps
        if self.schedule == "wsd":
            first = max(self.decay_start, first)
        # The last step's rate is above the final one.
        progress = max(step - first, 0) / max(self.max_steps - first, 1)
        match self.schedule:
            case "constant":
                return self.peak
            case "linear" | "wsd":
                shape = 1.0 - progress
            case "cosine":
                shape = 0.5 * (1.0 + math.cos(math.pi * progress))
            case _:
                raise AssertionError(self.schedule)
        return self.peak * (self.min_fraction + (1.0 - self.min_fraction) * shape)
