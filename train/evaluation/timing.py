"""The speed-up of a drafter from pairs of measurements, one pair for each prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from train.resampling.bootstrap import Resamples, median_interval

MIN_PROMPTS = 5  # the median of fewer says little
# The upper bound of the interval may be this many times the lower one. A wider interval does not tell a
# speed-up from a slow-down, or a good drafter from a poor one.
MAX_SPREAD = 1.5


@dataclass(frozen=True)
class TimedPrompt:
    """One prompt, decoded with the drafter and without it."""

    num_tokens: int
    seconds: float
    plain_num_tokens: int
    plain_seconds: float

    @property
    def ratio(self) -> float:
        """The tokens per second with the drafter, divided by those without it."""
        return (self.num_tokens / self.seconds) / (self.plain_num_tokens / self.plain_seconds)


def paired_timing(prompts: Sequence[TimedPrompt], how: str) -> dict[str, Any]:
    """Return both rates and the median of the prompts' ratios with its 95 % interval over prompts.

    Where these do not give the speed-up, it is None, and `unknown` has the reason.

    Args:
        how: says how the two sides were paired.
    """
    found = median_interval([one.ratio for one in prompts], Resamples(len(prompts)))
    unknown = None
    if len(prompts) < MIN_PROMPTS:
        unknown = f"{len(prompts)} prompts were timed, and at least {MIN_PROMPTS} are needed"
    elif found.high > MAX_SPREAD * found.low:
        unknown = f"the times vary too much (95 % interval {found.low:.2f} to {found.high:.2f})"
    return {
        "how": how,
        "num_prompts": len(prompts),
        "tokens_per_second": sum(one.num_tokens for one in prompts) / sum(one.seconds for one in prompts),
        "plain_tokens_per_second": sum(one.plain_num_tokens for one in prompts)
        / sum(one.plain_seconds for one in prompts),
        "speedup": None if unknown else found.value,
        "low": found.low,
        "high": found.high,
        "unknown": unknown,
        "ratios": [one.ratio for one in prompts],
    }
