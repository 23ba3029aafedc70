"""Intervals from resamples of the prompts: of acceptance lengths, their ratios, and medians."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A value with the bounds that hold 95 % of the resamples."""

    value: float
    low: float
    high: float


class Resamples:
    """Prompts, drawn with replacement, as how often each is drawn. The first resample has each once.

    Values that are computed with the same resamples can be compared within each of them.
    """

    def __init__(self, num_prompts: int, num: int = NUM_RESAMPLES, seed: int = 0) -> None:
        self.num = num
        self.seed = seed
        rng = np.random.default_rng(seed)
        drawn = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=num)
        self.prompts: Floats = np.vstack([np.ones(num_prompts), drawn]).astype(float)  # [1 + B, P]


def interval(values: Floats) -> Interval:
    """Return the first value, and the bounds of the others that are a number or infinity. [1 + B]"""
    others = np.sort(values[1:][~np.isnan(values[1:])])
    if np.isnan(values[0]) or not len(others):
        return Interval(float(values[0]), np.nan, np.nan)
    low, high = (others[round(share * (len(others) - 1))] for share in (0.025, 0.975))
    return Interval(float(values[0]), float(low), float(high))


def acceptance_lengths(drafts: ArrayLike, accepted: ArrayLike, resamples: Resamples) -> Floats:
    """Return the acceptance length of all drafts in each resample, NaN where there is none. [1 + B]

    Args:
        drafts: [P], the number of each prompt's drafts.
        accepted: [P], the number of each prompt's accepted tokens.
    """
    num_drafts: Floats = resamples.prompts @ np.asarray(drafts, float)
    num_accepted: Floats = resamples.prompts @ np.asarray(accepted, float)
    with np.errstate(invalid="ignore"):
        found: Floats = 1 + num_accepted / num_drafts
    return found


def acceptance_interval(drafts: ArrayLike, accepted: ArrayLike, resamples: Resamples) -> Interval:
    """Return the acceptance length of all drafts, with its interval over prompts."""
    return interval(acceptance_lengths(drafts, accepted, resamples))


def paired_ratio(measured: dict[str, Any], reference: dict[str, Any], index: int) -> Interval:
    """Return one acceptance length divided by the reference's, of the same prompts, with its interval.

    The interval does not include how much prompts differ from each other.

    Args:
        measured, reference: have `by_prompt` as evaluation.json has it.
        index: of the draft length.
    """
    resamples = Resamples(len(reference["by_prompt"]["drafts"][index]))
    sides = []
    for one in (measured, reference):
        drafts, accepted = (one["by_prompt"][name][index] for name in ("drafts", "accepted"))
        sides.append(acceptance_lengths(drafts, accepted, resamples))
    return interval(sides[0] / sides[1])


def median_interval(values: Sequence[float], resamples: Resamples) -> Interval:
    """Return the median with its interval over prompts. values: [P]."""
    counts = resamples.prompts.astype(int)
    return interval(np.array([np.median(np.repeat(values, drawn)) for drawn in counts]))
