from dataclasses import replace

import pytest

from tests.eagle31.tiny import tiny_config
from train.config.training import OptimConfig, Optimizer
from train.optim.learning_rates import described, rule_lr, rule_matrix_lr, with_rates


@pytest.mark.parametrize(
    ("hidden_size", "low", "high"),
    [
        (4096, 0.9e-4, 2e-4),  # EAGLE 3 and SpecForge for 8B targets: 1e-4
        (7168, 4.5e-5, 1e-4),  # TorchSpec for Kimi K2.5: 5e-5
        (256, 1.5e-3, 3.2e-3),
        (128, 2e-3, 6.3e-3),
    ],
)
def test_the_rule_gives_published_rates(hidden_size: int, low: float, high: float) -> None:
    drafter = replace(tiny_config(), hidden_size=hidden_size)
    assert low <= rule_lr(drafter) <= high


@pytest.mark.parametrize("width", [64, 128, 256])
def test_rates_transfer_over_width_and_depth(width: int) -> None:
    drafter = replace(tiny_config(), hidden_size=width)
    wider, deeper = replace(drafter, hidden_size=2 * width), replace(drafter, num_hidden_layers=4)
    assert rule_lr(drafter) == pytest.approx(2 * rule_lr(wider))
    assert rule_matrix_lr(drafter) == rule_matrix_lr(wider)
    assert rule_lr(drafter) == pytest.approx(2 * rule_lr(deeper))
    assert rule_matrix_lr(drafter) == pytest.approx(2 * rule_matrix_lr(deeper))


def test_a_rate_that_is_given_is_kept() -> None:
    drafter = tiny_config()
    assert with_rates(OptimConfig(), drafter) == OptimConfig(
        lr=rule_lr(drafter), matrix_lr=rule_matrix_lr(drafter)
    )
    given = OptimConfig(name=Optimizer.muon, lr=3e-3)
    complete = with_rates(given, drafter)
    assert (complete.lr, complete.matrix_lr) == (3e-3, rule_matrix_lr(drafter))
    assert described(given, drafter) == "muon, lr 0.003, matrix_lr 0.03 (rule)"
    assert described(complete, drafter) == "muon, lr 0.003, matrix_lr 0.03"
