"""How long training runs, and how often it logs, validates and saves."""

import math
from dataclasses import dataclass, field

from eagle31.errors import UserError
from train.config.run import RunConfig
from train.config.training import OptimConfig, Schedule, TrainConfig
from train.trainer.checkpoints import TrainState
from train.trainer.learning_rate import LearningRate
from train.trainer.metrics import Speed

# The part of the steps in which the rate falls under `wsd`; MiniCPM (arXiv 2404.06395) found a tenth enough.
_DECAY_FRACTION = 0.2
# Of a run, by default. A validation is a forward pass of the held-out samples; a crash costs a save's part.
_VALIDATIONS, _SAVES = 20, 50


@dataclass(frozen=True)
class LoopSettings:
    """The loop's settings in steps."""

    max_steps: int
    learning_rate: LearningRate
    max_grad_norm: float
    num_depths: int  # speculation steps
    log_every: int
    validate_every: int
    save_every: int
    draft_tokens: int  # k of the acceptance length that chooses the checkpoint
    saves_after: int | None = None  # a step after which there is a checkpoint, whatever `save_every` says
    speed: Speed = field(default_factory=Speed)

    def due(self, step: int) -> tuple[bool, bool, bool]:
        """Return whether the loop logs, validates and saves after a step, counted from 1."""
        last = step == self.max_steps
        return (
            last or step % self.log_every == 0,
            last or step % self.validate_every == 0,
            last or step % self.save_every == 0 or step == self.saves_after,
        )


def loop_settings(
    config: RunConfig, optim: OptimConfig, state: TrainState, max_steps: int, speed: Speed
) -> LoopSettings:
    """Return the loop's settings, with the recipe's fractions in steps."""
    assert optim.lr is not None
    decay_start = max(max_steps - math.ceil(_DECAY_FRACTION * max_steps), state.continued_at)
    steps = max_steps - state.continued_at
    warmup_steps = math.ceil(optim.warmup_fraction * max_steps)
    if state.continued_at:  # more steps in all would warm up again
        warmup_steps = min(warmup_steps, state.continued_at)
    return LoopSettings(
        max_steps=max_steps,
        learning_rate=LearningRate(
            peak=optim.lr,
            schedule=optim.schedule.value,
            warmup_steps=warmup_steps,
            max_steps=max_steps,
            decay_start=decay_start,
        ),
        max_grad_norm=optim.max_grad_norm,
        num_depths=config.train.ttt_steps,
        log_every=config.train.log_every,
        validate_every=config.train.validate_every or math.ceil(steps / _VALIDATIONS),
        save_every=config.train.save_every or math.ceil(steps / _SAVES),
        draft_tokens=config.evaluate.draft_tokens,
        # From there the rate falls; a longer training continues from this checkpoint.
        saves_after=decay_start if optim.schedule is Schedule.wsd else None,
        speed=speed,
    )


def steps_of_epochs(train: TrainConfig, rows_per_epoch: int, state: TrainState) -> int:
    """Return the step at which `train.num_epochs` are complete; epochs in an earlier order do not count."""
    left = (state.first_epoch + train.num_epochs - state.epoch) * rows_per_epoch - state.row
    return max(1, state.step + left // train.rows_per_step)


def run_steps(train: TrainConfig, rows_per_epoch: int, state: TrainState) -> int:
    """Return the number of optimizer steps of the run, with the recipe's epochs in steps.

    Raises:
        UserError: no step is left for a training that has just continued another.
    """
    max_steps = train.max_steps or steps_of_epochs(train, rows_per_epoch, state)
    if state.step and state.step == state.continued_at and state.step >= max_steps:
        remedy = f"These epochs end with step {max_steps}, and the training to continue is at {state.step}."
        raise UserError("train.num_epochs", train.num_epochs, f"{remedy} Give more, or give train.max_steps.")
    return max_steps
