"""The training loop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import deepspeed
import torch
from torch import Tensor

from data.batches.device_rows import DeviceRows, StepRows
from data.progress import Progress
from eagle31.kernels.transfer import HostCopy, to_device
from train.distributed import World, sum_over_ranks
from train.stop import Stopped
from train.tracking import Tracker
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.engine import full_state
from train.trainer.learning_rate import LearningRate
from train.trainer.metrics import Speed, WindowSums, source_metrics
from train.trainer.optimizer import ClippedAdamW
from train.trainer.skipped import SkippedSteps, spoiled_unless_finite
from train.trainer.validation import DriftDiagnosis, ReplayValidation


@dataclass(frozen=True)
class LoopSettings:
    """How long training runs, and how often it logs, validates and saves."""

    max_steps: int
    learning_rate: LearningRate
    num_depths: int  # speculation steps
    log_every: int
    validate_every: int
    save_every: int
    draft_tokens: int  # k of the acceptance length that chooses the checkpoint
    saves_after: int | None = None  # a step after which there is a checkpoint, whatever `save_every` says
    speed: Speed = field(default_factory=Speed)


class Action(NamedTuple):
    """What the loop does after every so many steps, and after the last one."""

    every: int
    run: Callable[[], None]
    also_after: int | None = None


class TrainingLoop:
    """Trains from the state's step to `settings.max_steps`; the best weights are left in `checkpoints`."""

    def __init__(
        self,
        model_engine: deepspeed.DeepSpeedEngine,
        rows: DeviceRows,
        validation: ReplayValidation,
        diagnosis: DriftDiagnosis,
        checkpoints: CheckpointDirectory,
        tracker: Tracker,
        skipped: SkippedSteps,
        settings: LoopSettings,
        state: TrainState,
        world: World,
    ) -> None:
        self.model_engine, self.rows, self.world = model_engine, rows, world
        self.validation, self.diagnosis = validation, diagnosis
        self.checkpoints, self.tracker, self.skipped = checkpoints, tracker, skipped
        self.settings, self.state = settings, state
        self.window = WindowSums(settings.num_depths, world.device)
        self.bar = Progress("train", settings.max_steps, "steps", initial=state.step, shown=world.is_main)
        self.stop_reason: Callable[[], str | None] = lambda: None
        self.saved_step = state.step
        self.learning_rate = 0.0  # of the newest step
        self.grad_norm = torch.tensor(0.0)  # of the newest step, before clipping

    def run(self, stop_reason: Callable[[], str | None]) -> TrainState:
        """Train. Every rank calls.

        Args:
            stop_reason: returns why this rank is to stop, or None.

        Raises:
            Stopped: a rank was asked to stop, and a checkpoint is saved.
            UserError: too many steps in a row were skipped.
        """
        settings, state, self.stop_reason = self.settings, self.state, stop_reason
        log = Action(settings.log_every, self._log)
        save = Action(settings.save_every, self._save, also_after=settings.saves_after)
        validate = Action(settings.validate_every, self._validate)
        with self.bar:
            self.rows.loader.read_ahead(state.step)
            if state.best_step is None or (
                state.step % settings.validate_every == 0 and state.validated_step != state.step
            ):
                self._validate()
            while state.step < settings.max_steps:
                due = [one for one in (log, validate, save) if self._is_due(one)]
                stop = self._step(with_metrics=log in due) and state.step < settings.max_steps
                if stop:
                    # There may be no time to validate; the run that resumes does it first.
                    due = [one for one in due if one is log]
                self._report_skipped(wait=bool(due))
                if self.skipped.num_in_a_row:
                    # The weights may be useless; they must not replace good ones.
                    due = [one for one in due if one is not save]
                for action in due:
                    action.run()
                if stop:
                    self._stop()
            self.checkpoints.finish()
        return state

    def _stop(self) -> NoReturn:
        """Save, and end the run."""
        self._report_skipped(wait=True)
        if self.state.step > self.saved_step:
            self._save()
        self.checkpoints.finish()
        if self.world.is_main:
            print(f"train: saved after step {self.state.step} and stopped; the same command resumes")
        raise Stopped(self.state.step, self.stop_reason())

    def _is_due(self, action: Action) -> bool:
        """Return whether an action follows the next step."""
        step = self.state.step + 1
        return step % action.every == 0 or step in (self.settings.max_steps, action.also_after)

    def _step(self, *, with_metrics: bool) -> bool:
        """Train one step; return whether some rank was asked to stop.

        Where a rank gave up to wait for its rows, the run that resumes trains the step.
        """
        state, window = self.state, self.window
        window.steps.begin()
        waited_before = self.rows.waited_seconds
        step_rows = self.rows.of_step(state.step)
        self.learning_rate = self.settings.learning_rate.at(state.step)
        counts, self.grad_norm = optimizer_step(
            self.model_engine,
            step_rows,
            self.learning_rate,
            window,
            self.world,
            with_metrics=with_metrics,
            stop=self.stop_reason() is not None,
            lacking=self.rows.loader.gave_up,
        )
        window.steps.end()
        num_supervised, num_stopping, num_lacking = counts.read()
        if num_lacking:
            self._stop()
        state.step += 1
        state.epoch, state.row = self.rows.loader.position(state.step)
        self.skipped.record(state.step, self.model_engine.basic_optimizer.refused)
        state.supervised_positions += num_supervised
        window.waited_seconds += self.rows.waited_seconds - waited_before
        self.bar.update()
        return num_stopping > 0

    def _log(self) -> None:
        with self.window.timed("checkpoint"):
            self.checkpoints.finish(wait=False)
        metrics = self.window.metrics(self.world, self.settings.speed)
        norm = float(self.grad_norm)
        metrics["learning_rate"] = self.learning_rate
        metrics["grad_norm"] = norm if math.isfinite(norm) else None
        if (stats := self.rows.loader.collect_stats()) is not None:
            metrics |= source_metrics(stats, self.world)
        self.tracker.log({"kind": "train", "step": self.state.step} | metrics)
        agreement = metrics["depth"][0]["agreement"]
        self.bar.note(f"loss {metrics['loss']:.3f}, first draft right {agreement:.3f}")
        self.state.step_seconds += sum(self.window.steps.seconds())
        self.window = WindowSums(self.settings.num_depths, self.world.device)

    def _validate(self) -> None:
        """Validate by replay, save the weights if they are the best so far, and log their drift."""
        state, started = self.state, time.perf_counter()
        with self.window.timed("validation"):
            stats = self.validation.run(self.model_engine.module)
            chosen = stats[self.settings.draft_tokens]
            record = {
                "acceptance_length": {str(k): one.acceptance_length for k, one in stats.items()},
                "num_drafts": chosen.num_drafts,
                "conditional_acceptance": list(chosen.conditional_acceptance),
                "seconds": time.perf_counter() - started,
            }
            self.tracker.log({"kind": "validation", "step": state.step} | record)
            state.validated_step = state.step
            # On a tie the later one, which has been trained for longer, is better.
            best = state.best_step is None or chosen.acceptance_length >= state.best_acceptance_length
            if best and not self.skipped.num_in_a_row:
                state.best_step, state.best_acceptance_length = state.step, chosen.acceptance_length
                weights = full_state(self.model_engine, keep=self.world.is_main)
                if self.world.is_main:
                    self.checkpoints.save_best(weights, state)
        self._diagnose()

    def _diagnose(self) -> None:
        started = time.perf_counter()
        with self.window.timed("diagnosis"):
            found = self.diagnosis.run(self.model_engine.module)
        if found is not None:
            seconds = {"seconds": time.perf_counter() - started}
            self.tracker.log({"kind": "drift", "step": self.state.step} | found | seconds)

    def _save(self) -> None:
        with self.window.timed("checkpoint"):
            self.checkpoints.save(self.model_engine, self.state)
        self.saved_step = self.state.step

    def _report_skipped(self, *, wait: bool) -> None:
        """Log the skipped steps that the host knows of, with their samples."""
        for step in self.skipped.collect(wait=wait):
            self.state.skipped_steps += 1
            if self.world.is_main:
                names = self.skipped.samples_of(step)
                self.tracker.log({"kind": "skipped", "step": step, "samples": names})
                problem = "its loss or gradient is not finite"
                print(
                    f"train: step {step} is skipped: {problem}. Its samples: {', '.join(names)}", flush=True
                )
        self.skipped.check(self.checkpoints.newest())


def optimizer_step(
    model_engine: deepspeed.DeepSpeedEngine,
    step_rows: StepRows,
    lr: float,
    window: WindowSums,
    world: World,
    *,
    with_metrics: bool,
    stop: bool = False,
    lacking: bool = False,
) -> tuple[HostCopy, Tensor]:
    """Run forward, backward and update over this rank's micro-batches.

    The host does not wait for the device at ZeRO 0, 1 and 2. DeepSpeed waits at ZeRO 3, in each micro-batch
    for its reductions and in each step for the gradient's norm, and wherever the optimizer is on the CPU. One
    collective operation has all that the ranks need to know of each other.

    Args:
        with_metrics: also compute `LOGGED_METRICS`, which need the target's full vocabulary.
        stop: whether this rank was asked to stop.
        lacking: whether its rows lack samples. The step then changes nothing on any rank.

    Returns:
        Over all ranks the number of supervised positions, of ranks that were asked to stop, and of those
        whose rows lack samples; and the gradient's norm before clipping.
    """
    own = torch.tensor([step_rows.counts.num_supervised, int(stop), int(lacking)])
    counts = sum_over_ranks(to_device([own], world.device)[0])
    # DeepSpeed averages over as many micro-batches as the largest step has, and at ZeRO 3 over ranks. But the
    # loss is a sum over all of them, divided once.
    averaged = model_engine.gradient_accumulation_steps()
    if model_engine.gradient_average:
        averaged *= world.size
    scale = averaged / counts[0].clamp(min=1).double()
    on_host = HostCopy(counts)
    optimizer: ClippedAdamW = model_engine.basic_optimizer
    optimizer.set_learning_rate(lr)
    optimizer.withheld = counts[2] > 0
    window.count(step_rows.counts)
    for number, row in enumerate(step_rows.rows, start=1):
        model_engine.set_gradient_accumulation_boundary(number == step_rows.num_rows)
        loss, sums = model_engine(row.batch, row.schedule, with_metrics)
        model_engine.backward(loss * scale.to(loss.dtype) * spoiled_unless_finite(loss))
        model_engine.step()
        window.add(sums, with_metrics)
    return on_host, optimizer.grad_norm
