"""The number of steps of a training, and of those between validations and checkpoints."""

import pytest

from tests.train.torchrun import composed
from train.config.training import TrainConfig
from train.trainer.checkpoints import TrainState
from train.trainer.metrics import Speed
from train.trainer.settings import loop_settings, steps_of_epochs

TRAIN = TrainConfig(rows_per_step=8, num_epochs=2)


def test_epochs_are_complete_but_for_a_part_of_a_step() -> None:
    assert steps_of_epochs(TRAIN, 101, TrainState()) == 25
    # A resumed run ends with the same step.
    for step in range(26):
        epoch, row = divmod(8 * step, 101)
        assert steps_of_epochs(TRAIN, 101, TrainState(step, epoch=epoch, row=row)) == 25


def test_a_continued_training_counts_the_epochs_of_its_data() -> None:
    state = TrainState(100, epoch=3, first_epoch=3, continued_at=100)
    assert steps_of_epochs(TRAIN, 40, state) == 110
    assert steps_of_epochs(TRAIN, 40, TrainState(100, epoch=6, first_epoch=3)) < 100


@pytest.mark.parametrize(
    ("continued_at", "given", "expected"), [(0, "null", (50, 20)), (900, "null", (5, 2)), (0, "7", (7, 7))]
)
def test_validations_and_checkpoints_are_parts_of_the_run(
    continued_at: int, given: str, expected: tuple[int, int]
) -> None:
    config = composed(
        "quickstart", "optim.lr=1e-3", f"train.validate_every={given}", f"train.save_every={given}"
    )
    settings = loop_settings(config, config.optim, TrainState(continued_at=continued_at), 1000, Speed())
    assert (settings.validate_every, settings.save_every) == expected


@pytest.mark.parametrize(("continued_at", "rate"), [(0, 801 / 1500), (800, 1.0)])
def test_a_training_that_continues_does_not_warm_up_again(continued_at: int, rate: float) -> None:
    config = composed("quickstart", "optim.lr=1e-3", "optim.schedule=wsd", "optim.warmup_fraction=0.015")
    state = TrainState(800, continued_at=continued_at)
    settings = loop_settings(config, config.optim, state, 100_000, Speed())
    assert settings.learning_rate.at(800) == pytest.approx(1e-3 * rate)
