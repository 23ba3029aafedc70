import numpy as np
import pytest

from train.draft_length.choice import acceptance_resamples, choose, schedule
from train.draft_length.step_times import StepTimes
from train.resampling.bootstrap import Floats

DRAFTS = [[10, 20, 30], [8, 15, 22]]
ACCEPTED = [[8, 10, 24], [12, 12, 33]]


def certain(*lengths: float) -> Floats:
    """Acceptance lengths at draft lengths 1, 2, ... that are the same in every resample."""
    return np.tile([1.0, *lengths], (101, 1))


def times(plain: float, *steps: float, concurrency: int = 1) -> StepTimes:
    return StepTimes(concurrency, (plain,), {k: (step,) for k, step in enumerate(steps, start=1)})


def test_acceptance_lengths_are_those_of_the_counts_and_resampled_by_prompt() -> None:
    lengths = acceptance_resamples(DRAFTS, ACCEPTED)
    assert lengths[0] == pytest.approx([1, 1 + 42 / 60, 1 + 57 / 45])
    assert (lengths[:, 0] == 1).all()
    # At most as in the best prompt, at least as in the worst.
    assert lengths[1:, 1].max() == pytest.approx(1.8)
    assert lengths[1:, 1].min() == pytest.approx(1.5)


def test_the_fastest_draft_length_has_the_best_ratio_of_tokens_to_time() -> None:
    choice = choose(certain(1.8, 2.4, 2.7, 2.8), times(10, 11, 12, 13, 14))
    assert choice.best.k == 3
    assert choice.best.speedup.value == pytest.approx(2.7 / 1.3)
    assert choice.best.tokens_per_second == pytest.approx(2.7 / 0.013)
    assert (choice.share, choice.rivals) == (1.0, ())
    assert [one.k for one in choice.candidates] == [0, 1, 2, 3, 4]


def test_where_steps_get_too_long_no_drafter_is_the_fastest() -> None:
    choice = choose(certain(1.5, 1.7), times(10, 16, 19, concurrency=64))
    assert (choice.best.k, choice.best.speedup.value) == (0, 1.0)


def test_the_interval_is_that_of_the_acceptance_length_scaled() -> None:
    lengths = acceptance_resamples(DRAFTS, ACCEPTED)
    choice = choose(lengths, times(10, 12.5, 20))
    one = choice.candidates[1]
    low, high = np.quantile(lengths[1:, 1], [0.025, 0.975], method="nearest") * 10 / 12.5
    assert (one.speedup.low, one.speedup.high) == pytest.approx((low, high))


def test_disturbed_rounds_make_rivals() -> None:
    lengths = certain(1.8, 2.2)
    quiet = StepTimes(1, (10.0,) * 3, {1: (11.0,) * 3, 2: (12.0,) * 3})
    assert choose(lengths, quiet).rivals == ()
    noisy = StepTimes(1, (10.0,) * 3, {1: (11.0, 9.0, 15.0), 2: (12.0, 12.0, 12.0)})
    choice = choose(lengths, noisy)
    assert (choice.best.k, choice.rivals) == (2, (1,))
    assert 0.5 < choice.share < 1
    assert choice.candidates[1].speedup.low < choice.candidates[1].speedup.high


def test_an_extrapolated_draft_length_is_marked_and_not_recommended() -> None:
    known = StepTimes(1, (10.0,), {2: (11.0,), 3: (11.5,)})
    choice = choose(certain(1.8, 2.5, 3.1, 3.6, 4.0), known)
    assert [one.covered for one in choice.candidates] == [True, False, True, True, False, False]
    assert choice.best.k == 3
    assert choice.rivals == (4, 5)  # faster, if the line continues


def test_a_schedule_has_a_range_of_batch_sizes_for_each_draft_length() -> None:
    slow, fast = certain(1.5, 1.6), certain(1.8, 2.7)
    at_one = choose(fast, times(10, 11, 12))
    at_four = choose(fast, times(10, 11, 12, concurrency=4))
    at_sixteen = choose(fast, times(10, 12, 20, concurrency=16))
    at_64 = choose(slow, times(10, 20, 30, concurrency=64))
    assert schedule([at_64, at_one, at_four, at_sixteen]) == [[1, 15, 2], [16, 63, 1], [64, 64, 0]]
    assert schedule([at_four]) == [[1, 4, 2]]
