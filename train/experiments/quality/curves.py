"""Curves of acceptance length, with bootstrap intervals over prompts and seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.resampling.bootstrap import Floats, Interval, Resamples, interval

UNTRAINED = 1.0  # the acceptance length before the first step: no draft is accepted


@dataclass(frozen=True)
class Curve:
    """The kept steps of one side with one budget: S seeds, C kept steps, P prompts.

    The seeds have the same steps and the same prompts.
    """

    name: str
    steps: tuple[int, ...]  # [C]
    minutes: Floats  # [S, C], of training
    supervised: Floats  # [S, C], supervised positions
    drafts: Floats  # [S, C, P]
    accepted: Floats  # [S, C, P], accepted tokens


def drawn_seeds(num_seeds: int, resamples: Resamples) -> NDArray[np.int64]:
    """Return the seeds of each resample, [1 + B, S]; the same for curves of as many seeds."""
    rng = np.random.default_rng([resamples.seed, num_seeds])
    drawn = rng.integers(num_seeds, size=(resamples.num, num_seeds))
    return np.vstack([np.arange(num_seeds), drawn])


def acceptance_lengths(curve: Curve, resamples: Resamples) -> Floats:
    """Return the mean over seeds of the acceptance length at each kept step, [1 + B, C]."""
    lengths = 1 + np.einsum("bp,scp->bsc", resamples.prompts, curve.accepted) / np.einsum(
        "bp,scp->bsc", resamples.prompts, curve.drafts
    )
    return _mean_over_seeds(lengths, resamples)


def training_minutes(curve: Curve, resamples: Resamples) -> Floats:
    """Return the mean over seeds of the minutes of training at each kept step, [1 + B, C]."""
    minutes = np.broadcast_to(curve.minutes, (resamples.num + 1, *curve.minutes.shape))
    return _mean_over_seeds(minutes, resamples)


def minutes_until(minutes: Floats, lengths: Floats, levels: Floats) -> Floats:
    """Return when each curve first has its level, by linear interpolation; infinity where it never has.

    Args:
        minutes, lengths: [N, C].
        levels: [N].
    """
    found = np.full(len(lengths), np.inf)
    for row, (x, y, level) in enumerate(zip(minutes, lengths, levels, strict=True)):
        reached = np.flatnonzero(y >= level)
        if level <= UNTRAINED:
            found[row] = 0.0
        elif len(reached):
            after = int(reached[0])
            x, y = np.concatenate([[0.0], x]), np.concatenate([[UNTRAINED], y])
            share = (level - y[after]) / (y[after + 1] - y[after])
            found[row] = x[after] + share * (x[after + 1] - x[after])
    return found


def lengths_after(minutes: Floats, lengths: Floats, when: float, tolerance: float = 0.1) -> Floats:
    """Return each curve's acceptance length after some minutes; NaN where it ended before.

    Args:
        minutes, lengths: [N, C].
        tolerance: a run may end before `when` by this fraction of it, because its steps are estimated.
    """
    found = np.full(len(lengths), np.nan)
    for row, (x, y) in enumerate(zip(minutes, lengths, strict=True)):
        if x[-1] >= when * (1 - tolerance):
            found[row] = np.interp(when, [0.0, *x], [UNTRAINED, *y])
    return found


def intervals(values: Floats) -> list[Interval]:
    """Return the interval of each column of [1 + B, C]."""
    return [interval(column) for column in values.T]


def _mean_over_seeds(values: Floats, resamples: Resamples) -> Floats:
    """[1 + B, S, C] -> [1 + B, C]"""
    seeds = drawn_seeds(values.shape[1], resamples)
    return np.take_along_axis(values, seeds[:, :, None], axis=1).mean(axis=1)


def levels_between(values: Sequence[float], num: int = 4) -> list[float]:
    """Return round acceptance lengths that the curves pass, at most `num`, ascending."""
    high = float(max(values))
    low = max(float(min(values)), UNTRAINED + 0.05)
    found: list[float] = []
    for spacing in (0.1, 0.25, 0.5, 1.0):
        first, last = math.ceil(low / spacing), math.floor(high / spacing)
        found = [round(index * spacing, 2) for index in range(first, last + 1)]
        if len(found) <= num:
            break
    return found[-num:]
