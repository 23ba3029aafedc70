"""The rate that short runs suggest, on losses that are known."""

import math

import pytest

from train.optim.short_runs import ShortRun, best_rate, bracketing_runs, rate_of_step, rounded, scaled_rate

BEST = 4e-3


def run(rate: float) -> ShortRun:
    """A run whose final loss is a parabola of the logarithm of its rate; it diverges far above the best."""
    final = 2.0 + math.log(rate / BEST) ** 2 / 10
    return ShortRun(rate, (9.0,) * 8 + ((final, final) if rate < 20 * BEST else (9.5, math.nan)))


@pytest.mark.parametrize("start", [1e-4, 1e-3, 4e-3, 3e-2, 0.2])
def test_the_best_rate_is_found_from_every_start(start: float) -> None:
    runs = bracketing_runs(run, start, factor=3.0, lowest=1e-6, highest=1.0)
    assert [one.rate for one in runs] == sorted(one.rate for one in runs)
    found = best_rate(runs)
    assert found == pytest.approx(BEST, rel=0.01)


def test_a_limit_that_is_reached_is_no_best_rate() -> None:
    runs = bracketing_runs(run, 1e-4, factor=3.0, lowest=1e-6, highest=1e-3)
    assert runs[-1].final_loss == min(one.final_loss for one in runs)
    assert best_rate(runs) is None


def test_a_run_that_diverged_has_no_final_loss() -> None:
    assert ShortRun(1.0, (3.0, 2.0, 3.1, 3.2, 3.3)).final_loss == math.inf
    assert ShortRun(1.0, (3.0, math.nan)).final_loss == math.inf
    assert ShortRun(1.0, (3.0, 2.0, 1.0, 1.0, 1.0)).final_loss == 1.0


def test_rates_of_a_short_run_rise_and_fall_to_nearly_zero() -> None:
    rates = [rate_of_step(step, 1.0, 40) for step in range(40)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 0.05


def test_a_longer_run_gets_a_lower_rate() -> None:
    assert scaled_rate(4e-3, 40, 160) == pytest.approx(2e-3)
    assert scaled_rate(4e-3, 40, 20) == 4e-3
    assert scaled_rate(0.2, 40, 160, of_matrices=True) == pytest.approx(0.05)
    assert rounded(0.0034567) == 0.0035
