import numpy as np
import pytest

from train.evaluation.intervals import Resamples, acceptance_interval, interval, median_interval


def test_an_interval_with_infinity_and_without_numbers() -> None:
    found = interval(np.array([2.0, *np.linspace(1.0, 3.0, 90), *[np.inf] * 10]))
    assert found.value == 2.0
    assert found.low == pytest.approx(1.0, abs=0.1)
    assert found.high == np.inf
    assert np.isnan(interval(np.array([np.nan, 1.0])).low)


def test_the_acceptance_length_is_that_of_all_drafts_and_its_interval_that_of_prompts() -> None:
    found = acceptance_interval([2, 6], [2, 12], Resamples(2))
    assert found.value == 1 + 14 / 8
    assert (found.low, found.high) == (1 + 2 / 2, 1 + 12 / 6)  # resamples with one of the prompts twice
    accepted = np.random.default_rng(0).normal(6.0, 2.0, 64)
    wide = acceptance_interval(np.full(64, 2), accepted, Resamples(64))
    error = accepted.std() / 2 / 8  # of the mean over 64 prompts with 2 drafts each
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    # A resample of prompts that are all shorter than a draft says nothing.
    short = acceptance_interval([0, 6], [0, 12], Resamples(2))
    assert short.value == short.low == short.high == 3.0


def test_the_median_of_few_values_is_no_outlier() -> None:
    found = median_interval([1.0, 2.0, 3.0, 4.0, 100.0], Resamples(5))
    assert found.value == 3.0
    assert 1.0 <= found.low < 3.0 < found.high <= 100.0
