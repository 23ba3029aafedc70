"""The number of steps of a training, and the rows of each."""

from dataclasses import replace

import pytest

from train.config.training import TrainConfig
from train.stages.train import row_schedule, steps_of_epochs
from train.trainer.checkpoints import TrainState

GROWING = TrainConfig(rows_per_step=8, rows_per_step_start=2, rows_growth_fraction=0.5, num_epochs=2)


@pytest.mark.parametrize("train", [GROWING, replace(GROWING, rows_per_step_start=None)], ids=str)
def test_epochs_are_complete_but_for_a_part_of_a_step(train: TrainConfig) -> None:
    rows_per_epoch = 101
    steps = steps_of_epochs(train, rows_per_epoch, TrainState())
    schedule = row_schedule(train, TrainState(), steps)
    assert 2 * rows_per_epoch - 8 < schedule.before(steps) <= 2 * rows_per_epoch
    assert (steps > 25) == schedule.grows
    # A resumed run ends with the same step.
    for step in range(steps + 1):
        epoch, row = divmod(schedule.before(step), rows_per_epoch)
        assert steps_of_epochs(train, rows_per_epoch, TrainState(step, epoch=epoch, row=row)) == steps


def test_a_training_that_continues_another_has_all_rows_in_each_step() -> None:
    state = TrainState(100, epoch=3, first_epoch=3, continued_at=100)
    assert row_schedule(GROWING, state, 120).of_step(100) == 8
    assert steps_of_epochs(GROWING, 40, state) == 100 + 2 * 40 // 8
    assert steps_of_epochs(replace(GROWING, num_epochs=1), 40, replace(state, epoch=5)) < 100
