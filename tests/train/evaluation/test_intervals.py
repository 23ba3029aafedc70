import numpy as np
import pytest

from train.evaluation.intervals import Interval, acceptance_interval, paired_ratio

DRAFTS, ACCEPTED = [5, 5, 5, 50, 50, 50], [5, 6, 4, 200, 190, 195]


def test_the_acceptance_length_is_that_of_all_drafts_and_its_interval_that_of_prompts() -> None:
    assert acceptance_interval([2, 6], [2, 12]).value == 1 + 14 / 8
    accepted = np.random.default_rng(0).normal(6.0, 2.0, 256)
    found = acceptance_interval(np.full(256, 2), accepted)
    error = accepted.std() / 2 / 16  # of the mean over 256 prompts with 2 drafts each
    assert found.value - found.low == pytest.approx(1.96 * error, rel=0.15)
    assert found.high - found.value == pytest.approx(1.96 * error, rel=0.15)


def test_a_skewed_interval_is_moved_as_bca_does() -> None:
    """Few prompts are much longer than the others; quantiles of the resamples reach less far up."""
    accepted = np.random.default_rng(1).lognormal(0.0, 1.2, 40)
    found = acceptance_interval(np.ones(40), accepted)
    drawn = np.random.default_rng(2).integers(40, size=(4000, 40))
    low, high = 1 + np.quantile(accepted[drawn].mean(1), (0.025, 0.975))
    assert found.low > low
    assert found.high > high + 0.05


def test_prompts_without_drafts_count_for_nothing() -> None:
    assert acceptance_interval([0, *DRAFTS, 0], [0, *ACCEPTED, 0]) == acceptance_interval(DRAFTS, ACCEPTED)


def test_sources_are_not_mixed_in_an_interval() -> None:
    """Prompts of one source are all alike, so that only mixing sources can widen the interval."""
    mixed = acceptance_interval(DRAFTS, ACCEPTED)
    apart = acceptance_interval(DRAFTS, ACCEPTED, strata=(3, 3))
    assert apart.value == mixed.value
    assert apart.high - apart.low < 0.3 * (mixed.high - mixed.low)


@pytest.mark.parametrize(
    ("drafts", "accepted", "expected"),
    [([4, 8, 2], [0, 0, 0], (1.0, 1.0, 1.0)), ([4], [2], (1.5, None, None)), ([], [], (np.nan, None, None))],
)
def test_values_without_spread_and_too_few_prompts(
    drafts: list[int], accepted: list[int], expected: tuple[float, ...]
) -> None:
    np.testing.assert_equal(vars(acceptance_interval(drafts, accepted)), vars(Interval(*expected)))


def test_a_ratio_over_the_same_prompts_does_not_have_their_differences() -> None:
    first, second = (
        {"by_prompt": {"drafts": [DRAFTS], "accepted": [[times * one for one in DRAFTS]]}} for times in (1, 3)
    )
    assert vars(paired_ratio(second, first, 0)) == dict.fromkeys(("value", "low", "high"), 2.0)
