"""The draft length that serves fastest at a concurrency.

A decoding step emits as many tokens of each sequence as the acceptance length says, so that a user gets

    acceptance_length(k) / step_time(k, concurrency)

tokens per second while the completion is written. Reading the prompt takes as long with every draft length
and is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from train.draft_length.step_times import StepTimes
from train.resampling.bootstrap import Floats, Interval, Resamples, interval

_ROUNDS_SEED = 1


@dataclass(frozen=True)
class Candidate:
    """The prediction for one draft length; 0 is the engine without a drafter."""

    k: int
    acceptance_length: float
    step_ms: float
    tokens_per_second: float  # of one user
    speedup: Interval  # over the engine without a drafter
    covered: bool  # whether the draft length is within the range of those with known times


@dataclass(frozen=True)
class Choice:
    """The predictions at one concurrency, and what follows from them."""

    concurrency: int
    candidates: tuple[Candidate, ...]  # draft lengths ascending, beginning with 0
    best: Candidate  # of those with known or interpolated times
    share: float  # of the resamples in which it is the fastest of these
    rivals: tuple[int, ...]  # draft lengths that may be as fast: the interval of the ratio reaches 1


def acceptance_resamples(drafts: ArrayLike, accepted: ArrayLike) -> Floats:
    """Return acceptance lengths at draft lengths 0 to K in resamples of the prompts. [1 + B, 1 + K]

    Args:
        drafts: [K, P], each prompt's number of drafts at draft lengths 1 to K.
        accepted: [K, P], each prompt's number of accepted tokens.
    """
    counts, hits = np.asarray(drafts, float), np.asarray(accepted, float)
    prompts = Resamples(counts.shape[1]).prompts
    lengths = 1 + (prompts @ hits.T) / (prompts @ counts.T).clip(min=1)
    return np.hstack([np.ones((len(prompts), 1)), lengths])


def choose(lengths: Floats, times: StepTimes) -> Choice:
    """Predict the rate at every draft length and return the fastest.

    A draft length whose time is extrapolated is never the best, but may be a rival of it. The intervals hold
    95 % of the resamples: of the prompts, and of the rounds of the measurement where it has several.

    Args:
        lengths: [1 + B, 1 + K], from `acceptance_resamples`.
    """
    num_resamples, num = lengths.shape
    milliseconds = _times(times, num, num_resamples)
    rates = 1000 * lengths / milliseconds
    speedups = rates / rates[:, :1]
    candidates = tuple(
        Candidate(
            k,
            float(lengths[0, k]),
            float(milliseconds[0, k]),
            float(rates[0, k]),
            interval(speedups[:, k]),
            times.covers(k),
        )
        for k in range(num)
    )
    covered = np.array([one.covered for one in candidates])
    best = candidates[int((covered * rates[0]).argmax())]
    fastest = (covered * rates[1:]).argmax(1)
    ratios = rates / rates[:, best.k : best.k + 1]
    rivals = [k for k in range(num) if k != best.k and interval(ratios[:, k]).high >= 1]
    return Choice(times.concurrency, candidates, best, float((fastest == best.k).mean()), tuple(rivals))


def _times(times: StepTimes, num: int, num_resamples: int) -> Floats:
    """Return medians over the rounds in resamples of the rounds. [1 + B, num]"""
    rounds = np.stack([times.at(k) for k in range(num)], axis=1)  # [R, num]
    drawn = np.random.default_rng(_ROUNDS_SEED).integers(len(rounds), size=(num_resamples, len(rounds)))
    drawn[0] = np.arange(len(rounds))
    return np.median(rounds[drawn], axis=1)


def schedule(choices: Sequence[Choice]) -> list[list[int]]:
    """Return vLLM's `num_speculative_tokens_per_batch_size`: ranges of batch sizes with their draft lengths.

    A batch size between two concurrencies has the draft length of the lower one, and one below the lowest or
    above the highest that of the nearest.
    """
    ordered = sorted(choices, key=lambda one: one.concurrency)
    starts = [1, *(one.concurrency for one in ordered[1:])]
    ends = [start - 1 for start in starts[1:]] + [ordered[-1].concurrency]
    ranges: list[list[int]] = []
    for start, end, one in zip(starts, ends, ordered, strict=True):
        if ranges and ranges[-1][2] == one.best.k:
            ranges[-1][1] = end
        else:
            ranges.append([start, end, one.best.k])
    return ranges
