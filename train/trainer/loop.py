"""The training loop."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import deepspeed
import torch
from torch import Tensor

from data.batches.device_rows import DeviceRows, StepRows
from data.batches.loader import RowLoader
from data.progress import Progress
from train.distributed import World, sum_over_ranks
from train.stop import Stopped, stop_reasons
from train.tracking import Tracker
from train.trainer.average import WeightAverage
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.guard import StepGuard, report_skipped, spoiled_unless_finite
from train.trainer.host_copy import HostCopy, sent
from train.trainer.learning_rate import learning_rate
from train.trainer.model_engine import full_state
from train.trainer.optimizer import GuardedAdamW, divisor_correction
from train.trainer.validation import ByLength, DriftDiagnosis, ReplayValidation
from train.trainer.window import Speed, WindowSums, source_metrics


@dataclass(frozen=True)
class LoopSettings:
    """How long training runs, and how often it logs, validates and saves."""

    max_steps: int
    warmup_steps: int
    peak_lr: float
    min_lr_fraction: float
    schedule: str
    num_depths: int
    log_every: int
    validate_every: int
    save_every: int
    keep_weights_every: int | None
    draft_tokens: int  # k of the acceptance length that chooses the checkpoint
    decay_start: int = 0  # the first step whose rate falls, and the shape of the fall, with schedule "wsd"
    decay_shape: str = "linear"
    head_start: int = 0  # the first step that changes the draft head
    diagnose_every: int = 1  # if the loop is given a diagnosis
    # Training ends after this many validations in a row that are not better than the best one; None: never.
    early_stop_validations: int | None = None
    speed: Speed = field(default_factory=Speed)
    stop_at: float | None = None  # the time limit, in seconds since the epoch


def train(
    model_engine: deepspeed.DeepSpeedEngine,
    loader: RowLoader,
    rows: DeviceRows,
    validation: ReplayValidation,
    checkpoints: CheckpointDirectory,
    tracker: Tracker,
    settings: LoopSettings,
    state: TrainState,
    world: World,
    dtype: torch.dtype,
    average: WeightAverage | None = None,
    diagnosis: DriftDiagnosis | None = None,
) -> TrainState:
    """Trains from `state.step` to `settings.max_steps` or to an early stop.

    The best weights are left in `checkpoints`.

    Args:
        average: the average of the weights, from which the best ones are then chosen.
        diagnosis: measures the drift of the weights that are trained. None: nothing does.

    Raises:
        Stopped: a rank was asked to stop, and a checkpoint is saved.
        UserError: too many steps in a row were skipped.
    """
    device = world.device
    guard: StepGuard = model_engine.basic_optimizer.guard
    guard.reference = state.grad_norm_reference
    bar = Progress("train", settings.max_steps, "steps", initial=state.step, shown=world.is_main)
    window = WindowSums(settings.num_depths, device)
    with stop_reasons(settings.stop_at) as stop_reason, bar:
        loader.read_ahead(state.step)
        if state.best_step is None:
            with window.timed("validation"):
                validate(
                    model_engine, validation, checkpoints, tracker, settings, state, world, dtype, average
                )
        if state.step == 0 and diagnosis is not None:
            with window.timed("diagnosis"):
                diagnose(model_engine, diagnosis, tracker, state, world, dtype)
        while state.step < settings.max_steps and not stops_early(state, settings):
            window.steps.begin()
            waited_before = rows.waited_seconds
            step_rows = rows.of_step(state.step)
            lr = learning_rate(
                state.step,
                peak=settings.peak_lr,
                schedule=settings.schedule,
                warmup_steps=settings.warmup_steps,
                max_steps=settings.max_steps,
                min_fraction=settings.min_lr_fraction,
                decay_start=settings.decay_start,
                decay_shape=settings.decay_shape,
            )
            trains_head = state.step >= settings.head_start
            state.step += 1
            state.epoch, state.row = loader.position(state.step)
            keeps = keeps_weights(state.step, settings)
            logs = keeps or state.step % settings.log_every == 0 or state.step == settings.max_steps
            counts, grad_norm = optimizer_step(
                model_engine,
                step_rows,
                lr,
                window,
                world,
                with_metrics=logs,
                stop=stop_reason() is not None,
                trains_head=trains_head,
            )
            if average is not None:
                average.update(guard.newest_refused)
            window.steps.end()
            guard.record(state.step)
            num_supervised, num_stopping = counts.read()
            window.waited_seconds += rows.waited_seconds - waited_before
            state.supervised_positions += num_supervised
            bar.update()
            validates = state.step % settings.validate_every == 0 or state.step == settings.max_steps
            diagnoses = diagnosis is not None and (
                state.step % settings.diagnose_every == 0 or state.step == settings.max_steps
            )
            saves = state.step % settings.save_every == 0 or state.step == settings.max_steps
            # From here on the rate falls; a longer training continues from this checkpoint.
            saves = saves or (settings.schedule == "wsd" and state.step == settings.decay_start)
            stop = num_stopping > 0
            wait = logs or validates or diagnoses or saves or stop
            report_skipped(guard, loader, tracker, checkpoints, state, world, wait=wait)
            if logs:
                metrics = window.metrics(world, settings.speed)
                norm = float(grad_norm)
                metrics |= {"learning_rate": lr, "grad_norm": norm if math.isfinite(norm) else None}
                if loader.schedule.grows:
                    metrics["rows_per_step"] = loader.schedule.of_step(state.step - 1)
                if (stats := loader.collect_stats()) is not None:
                    metrics |= source_metrics(stats, world)
                tracker.log({"kind": "train", "step": state.step} | metrics)
                bar.note(
                    f"loss {metrics['loss']:.3f}, first draft right {metrics['depth'][0]['agreement']:.3f}"
                )
                state.step_seconds += sum(window.steps.seconds())
                window = WindowSums(settings.num_depths, device)
            if validates:
                with window.timed("validation"):
                    choose = not guard.num_in_a_row
                    validate(
                        model_engine,
                        validation,
                        checkpoints,
                        tracker,
                        settings,
                        state,
                        world,
                        dtype,
                        average,
                        choose=choose,
                    )
                if stops_early(state, settings):
                    saves = True
                    if world.is_main:
                        print(_early_stop(state, settings), flush=True)
            if diagnosis is not None and diagnoses:
                with window.timed("diagnosis"):
                    diagnose(model_engine, diagnosis, tracker, state, world, dtype)
            if keeps:
                with window.timed("checkpoint"):
                    with averaged_weights(average):
                        weights = full_state(model_engine, keep=world.is_main)
                    checkpoints.keep_weights(weights, state)
            # While steps are skipped the weights may be useless; they must not replace good ones.
            if stop or (saves and not guard.num_in_a_row):
                state.grad_norm_reference = guard.reference
                with window.timed("checkpoint"):
                    checkpoints.save(model_engine, state, average)
            if stop and state.step < settings.max_steps and not stops_early(state, settings):
                if world.is_main:
                    print(f"train: saved after step {state.step} and stopped; the same command resumes")
                raise Stopped(state.step, stop_reason())
    return state


def stops_early(state: TrainState, settings: LoopSettings) -> bool:
    """Whether so many validations in a row were not better that training ends."""
    patience = settings.early_stop_validations
    return patience is not None and state.validations_since_best >= patience


def _early_stop(state: TrainState, settings: LoopSettings) -> str:
    return (
        f"train: stopped after step {state.step} of {settings.max_steps}: the last "
        f"{state.validations_since_best} validations were not better than the best one, after step "
        f"{state.best_step} (acceptance length {state.best_acceptance_length:.2f})"
    )


def keeps_weights(step: int, settings: LoopSettings) -> bool:
    """Whether the weights after this step stay."""
    every = settings.keep_weights_every
    return every is not None and (step % every == 0 or step == settings.max_steps)


def optimizer_step(
    model_engine: deepspeed.DeepSpeedEngine,
    step_rows: StepRows,
    lr: float,
    window: WindowSums,
    world: World,
    *,
    with_metrics: bool,
    stop: bool = False,
    trains_head: bool = True,
) -> tuple[HostCopy, Tensor]:
    """Runs forward, backward and update over this rank's micro-batches.

    The host does not wait for the device. One collective operation has all that the ranks need to know of
    each other.

    Args:
        with_metrics: also computes `LOGGED_METRICS`, which need the target's full vocabulary.
        stop: whether this rank was told to stop.
        trains_head: whether the step changes the draft head.

    Returns:
        Over all ranks the number of supervised positions and the number of ranks that were told to stop; and
        the gradient's norm before clipping.
    """
    counts = sum_over_ranks(sent([step_rows.counts.num_supervised, stop], world.device))
    # DeepSpeed averages over ranks, and over as many micro-batches as the largest step has. But the loss is a
    # sum over all of them, divided once.
    micro_batches = model_engine.gradient_accumulation_steps()
    scale = micro_batches * world.size / counts[0].clamp(min=1).double()
    on_host = HostCopy(counts)
    optimizer: GuardedAdamW = model_engine.basic_optimizer
    optimizer.set_learning_rate(lr, trains_head=trains_head)
    objective = model_engine.module.objective
    counted: Tensor | None = None
    window.count(step_rows.counts)
    for number, row in enumerate(step_rows.rows, start=1):
        is_last = number == step_rows.num_rows
        model_engine.set_gradient_accumulation_boundary(is_last)
        loss, sums = model_engine(row.batch, row.schedule, with_metrics)
        model_engine.backward(loss * scale.to(loss.dtype) * spoiled_unless_finite(loss))
        if not objective.count_outside_vocab:
            counted = sums.num_rows[0] if counted is None else counted + sums.num_rows[0]
        if is_last:
            optimizer.begin_step(None if counted is None else divisor_correction(counts[0], counted))
        model_engine.step()
        window.add(sums, with_metrics or objective.needs_full_vocabulary)
    optimizer.end_step()
    return on_host, optimizer.grad_norm


def validate(
    model_engine: deepspeed.DeepSpeedEngine,
    validation: ReplayValidation,
    checkpoints: CheckpointDirectory,
    tracker: Tracker,
    settings: LoopSettings,
    state: TrainState,
    world: World,
    dtype: torch.dtype,
    average: WeightAverage | None = None,
    *,
    choose: bool = True,
) -> None:
    """Validates by replay and saves the weights if they are the best so far. Every rank calls.

    Args:
        average: validated too, once it has begun; the averaged weights are then the ones to choose from.
        choose: whether the weights may be saved.
    """
    started = time.perf_counter()
    plain = validation.run(model_engine.module, world.device, dtype)
    averages = average is not None and average.begun
    weights: dict[str, dict[str, Tensor]] = {}
    with averaged_weights(average):
        stats = validation.run(model_engine.module, world.device, dtype) if averages else plain
        length = stats[settings.draft_tokens].acceptance_length
        # On a tie the later one, which has been trained for longer, is better.
        best = state.best_step is None or length >= state.best_acceptance_length
        if choose and best:
            weights["drafter"] = full_state(model_engine, keep=world.is_main)
    if averages and weights:
        weights["plain"] = full_state(model_engine, keep=world.is_main)
    record = {
        "kind": "validation",
        "step": state.step,
        "acceptance_length": _lengths(stats),
        "num_drafts": stats[settings.draft_tokens].num_drafts,
        "conditional_acceptance": list(stats[settings.draft_tokens].conditional_acceptance),
    }
    if averages:
        record["plain_acceptance_length"] = _lengths(plain)
    tracker.log(record | {"seconds": time.perf_counter() - started})
    if state.best_step is None or length > state.best_acceptance_length:
        state.validations_since_best = 0
    elif choose:
        state.validations_since_best += 1
    if weights:
        state.best_step, state.best_acceptance_length = state.step, length
        checkpoints.save_best(weights, state)


def diagnose(
    model_engine: deepspeed.DeepSpeedEngine,
    diagnosis: DriftDiagnosis,
    tracker: Tracker,
    state: TrainState,
    world: World,
    dtype: torch.dtype,
) -> None:
    """Log the drift of the weights as they are. Every rank calls."""
    started = time.perf_counter()
    found = diagnosis.run(model_engine.module, world.device, dtype)
    if found is not None:
        seconds = time.perf_counter() - started
        tracker.log({"kind": "drift", "step": state.step} | found | {"seconds": seconds})


def averaged_weights(average: WeightAverage | None) -> AbstractContextManager[None]:
    """Have the model engine hold the averaged weights, if there are any. Every rank enters."""
    return average.in_place_of_weights() if average is not None and average.begun else nullcontext()


def _lengths(stats: ByLength) -> dict[str, float]:
    return {str(k): one.acceptance_length for k, one in stats.items()}
