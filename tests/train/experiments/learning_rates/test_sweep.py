from pathlib import Path

import pytest

from train.config.training import Optimizer
from train.experiments.learning_rates.sweep import Trial, recipe
from train.planning.sizes import RunSizes


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_trial_changes_the_width_and_the_rate_of_its_optimizer(
    width: int, optimizer: str, tmp_path: Path
) -> None:
    rule, doubled = (recipe(Trial(width, optimizer, factor), tmp_path, 5) for factor in (1, 2))
    assert RunSizes(rule).drafter.hidden_size == width
    assert rule.optim.name is Optimizer(optimizer)
    factors = {"lr": 2 if optimizer == "adamw" else 1, "matrix_lr": 2 if optimizer == "muon" else 1}
    for name, factor in factors.items():
        assert getattr(doubled.optim, name) == pytest.approx(factor * getattr(rule.optim, name))
