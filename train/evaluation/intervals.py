"""95 % intervals over prompts: BCa bootstraps of quotients of sums."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
_NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; the bounds are None where there are too few prompts for one."""

    value: float
    low: float | None
    high: float | None

    @property
    def bounds(self) -> str:
        return "unknown" if self.low is None else f"{self.low:.2f} to {self.high:.2f}"

    def shown(self, unit: str = "") -> str:
        return f"{self.value:.2f}{unit} ({self.bounds})"


def over_prompts(
    statistic: Callable[..., Floats], *counts: ArrayLike, strata: Sequence[int] = ()
) -> Interval:
    """Return a statistic of sums over prompts, with its interval.

    A prompt is drawn with all of its counts, so that what is compared on the same prompts is paired.

    Args:
        statistic: elementwise function of the sums.
        counts: what is summed, each [P]. A prompt that has none of it does not count as one.
        strata: how many prompts each source has, in their order. As many are drawn from each.

    Source: Efron, Better Bootstrap Confidence Intervals, 1987.
    """
    from scipy.stats import bootstrap  # here, because it takes seconds

    table = np.array(counts, float)
    source = np.repeat(np.arange(len(strata) or 1), strata or table.shape[1])
    some = table.any(axis=0)

    def of(*chosen: NDArray[Any], axis: int = -1) -> Floats:
        prompts = np.concatenate(chosen, axis=axis).astype(int)
        return statistic(*(row[prompts].sum(axis) for row in table))

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of numbers that are NaN
        value = float(of(np.flatnonzero(some)))
        groups = [np.flatnonzero(some & (source == one)) for one in np.unique(source[some])]
        if not groups or min(map(len, groups)) < 2:
            return Interval(value, None, None)
        found = bootstrap(groups, of, n_resamples=_NUM_RESAMPLES, method="BCa", vectorized=True, rng=0)
        if np.ptp(found.bootstrap_distribution) == 0:  # for which BCa has no bounds
            return Interval(value, value, value)
    low, high = found.confidence_interval
    return Interval(value, float(low), float(high)) if low <= high else Interval(value, None, None)  # NaN


def acceptance_interval(drafts: ArrayLike, accepted: ArrayLike, strata: Sequence[int] = ()) -> Interval:
    """Return the acceptance length of all drafts. drafts, accepted: [P], the numbers of each prompt."""
    return over_prompts(lambda drafts, accepted: 1 + accepted / drafts, drafts, accepted, strata=strata)


def length_of(stats: dict[str, Any]) -> Interval:
    """Return the acceptance length among the statistics of a draft length in evaluation.json."""
    return Interval(stats["acceptance_length"], stats["low"], stats["high"])


def paired_ratio(measured: dict[str, Any], reference: dict[str, Any], index: int) -> Interval:
    """Return one acceptance length divided by the reference's, of the same prompts.

    The interval does not include how much prompts differ from each other.

    Args:
        measured, reference: have `by_prompt` as evaluation.json has it.
        index: of the draft length.
    """
    counts = [
        one["by_prompt"][name][index] for one in (measured, reference) for name in ("drafts", "accepted")
    ]
    return over_prompts(lambda d1, a1, d2, a2: (1 + a1 / d1) / (1 + a2 / d2), *counts)
