"""The number of steps of a training."""

from train.config.training import TrainConfig
from train.stages.train import steps_of_epochs
from train.trainer.checkpoints import TrainState

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
