"""Acceptance lengths of the same prompts, compared within the same resamples of them."""

from typing import Any

import numpy as np

from train.resampling.bootstrap import Floats, Interval, Resamples, interval


def resampled_lengths(measured: dict[str, Any], index: int, resamples: Resamples) -> Floats:
    """Return the acceptance length in each resample. [1 + B]

    Args:
        measured: has `by_prompt` as evaluation.json has it.
        index: of the draft length.
    """
    counts = measured["by_prompt"]
    drafts, accepted = (np.asarray(counts[name][index], float) for name in ("drafts", "accepted"))
    found: Floats = 1 + (resamples.prompts @ accepted) / (resamples.prompts @ drafts).clip(min=1)
    return found


def paired_ratio(measured: dict[str, Any], reference: dict[str, Any], index: int) -> Interval:
    """Return one acceptance length divided by the reference's, of the same prompts, with its interval.

    The interval does not include how much prompts differ from each other.
    """
    resamples = Resamples(len(reference["by_prompt"]["drafts"][index]))
    sides = [resampled_lengths(one, index, resamples) for one in (measured, reference)]
    return interval(sides[0] / sides[1])
