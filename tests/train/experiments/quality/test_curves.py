import math

import numpy as np
import pytest

from train.experiments.quality.curves import (
    Curve,
    acceptance_lengths,
    lengths_after,
    levels_between,
    minutes_until,
    training_minutes,
)
from train.resampling.bootstrap import Floats, Resamples, interval


def rows(*values: list[float]) -> Floats:
    return np.array(values, dtype=float)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (2.0, 1.0),  # a kept step
        (1.5, 0.5),  # before the first kept step, from 1 at minute 0
        (2.5, 2.0),  # between two of them
        (2.9, 2.8),  # the first crossing, although the curve falls below it again
        (3.0, 3.0),
        (3.1, math.inf),
        (1.0, 0.0),
    ],
)
def test_minutes_until_a_level(level: float, expected: float) -> None:
    minutes, lengths = rows([1.0, 3.0, 4.0, 5.0]), rows([2.0, 3.0, 2.8, 2.95])
    assert minutes_until(minutes, lengths, np.array([level])) == pytest.approx([expected])


def test_each_resample_has_its_own_level_and_times() -> None:
    minutes, lengths = rows([1.0, 2.0], [2.0, 4.0]), rows([1.5, 2.0], [1.5, 2.0])
    assert minutes_until(minutes, lengths, np.array([1.5, 1.75])) == pytest.approx([1.0, 3.0])


def test_lengths_after_some_minutes() -> None:
    minutes, lengths = rows([1.0, 3.0], [1.0, 2.0]), rows([2.0, 3.0], [2.0, 3.0])
    assert lengths_after(minutes, lengths, 2.0) == pytest.approx([2.5, 3.0])
    found = lengths_after(minutes, lengths, 3.1)
    assert found[0] == 3.0  # it ended a little earlier, as an estimated number of steps does
    assert np.isnan(found[1])


def curve(accepted: list[list[list[float]]]) -> Curve:
    counts = np.array(accepted)
    ones = np.ones(counts.shape[:2])
    return Curve(
        "side, 10 min", tuple(range(counts.shape[1])), ones, ones, np.full(counts.shape, 2.0), counts
    )


def test_the_acceptance_length_is_that_of_all_drafts_and_the_mean_over_seeds() -> None:
    one = curve([[[2.0, 4.0]], [[6.0, 8.0]]])
    drafts = np.array([[[2.0, 6.0]], [[2.0, 6.0]]])
    one = Curve(one.name, one.steps, one.minutes, one.supervised, drafts, one.accepted)
    found = acceptance_lengths(one, Resamples(2))
    assert found.shape == (1001, 1)
    assert found[0, 0] == pytest.approx(((1 + 6 / 8) + (1 + 14 / 8)) / 2)


def test_intervals_hold_the_spread_of_prompts_and_of_seeds() -> None:
    prompts = np.random.default_rng(0).normal(3.0, 1.0, 64)
    by_prompt = interval(acceptance_lengths(curve([[list(prompts)]]), Resamples(64))[:, 0])
    error = prompts.std() / 2 / 8  # of the mean over 64 prompts with 2 drafts each
    assert by_prompt.high - by_prompt.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    same = [2.0] * 64
    by_seed = interval(acceptance_lengths(curve([[same], [[4.0] * 64]]), Resamples(64))[:, 0])
    assert (by_seed.low, by_seed.value, by_seed.high) == pytest.approx((2.0, 2.5, 3.0))


def test_minutes_are_resampled_with_their_seeds() -> None:
    one = curve([[[2.0]], [[4.0]]])
    minutes = np.array([[1.0], [3.0]])
    one = Curve(one.name, one.steps, minutes, one.supervised, one.drafts, one.accepted)
    resamples = Resamples(1)
    lengths, times = acceptance_lengths(one, resamples), training_minutes(one, resamples)
    assert times[0, 0] == 2.0
    assert lengths[:, 0] == pytest.approx(1 + times[:, 0] / 2 + 0.5)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [([2.0, 3.0], [2.0, 2.5, 3.0]), ([1.0, 1.31], [1.1, 1.2, 1.3]), ([2.21, 2.22], []), ([1.0], [])],
)
def test_round_levels(ends: list[float], expected: list[float]) -> None:
    assert levels_between(ends) == expected
