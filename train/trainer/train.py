"""The training loop: rows, forward and backward, clip, update; log, validate, save."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import deepspeed
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from data.batches.device_rows import DeviceRows, StepRows
from data.progress import Progress
from eagle31.kernels.transfer import to_device
from train.distributed import World, sum_over_ranks
from train.stop import Stopped
from train.tracking import Tracker
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.engine import full_state
from train.trainer.engine_state import has_whole_gradient, reduced_gradients
from train.trainer.host_copy import HostCopy
from train.trainer.metrics import WindowSums, source_metrics
from train.trainer.settings import LoopSettings
from train.trainer.skipped import SkippedSteps, spoiled_unless_finite
from train.trainer.validation import DriftDiagnosis, ReplayValidation

_EPSILON = 1e-6  # added to the norm, as PyTorch and DeepSpeed do


@dataclass(frozen=True)
class Training:
    """What the loop trains with, on this rank."""

    engine: deepspeed.DeepSpeedEngine
    rows: DeviceRows
    validation: ReplayValidation
    diagnosis: DriftDiagnosis
    checkpoints: CheckpointDirectory
    tracker: Tracker
    skipped: SkippedSteps
    settings: LoopSettings
    state: TrainState
    world: World


def train_loop(training: Training, stop_reason: Callable[[], str | None]) -> None:
    """Train from the state's step to the last one; the best weights are left in the checkpoints' directory.

    Every rank calls.

    Args:
        stop_reason: returns why this rank is to stop, or None.

    Raises:
        Stopped: a rank was asked to stop, and a checkpoint is saved.
        UserError: too many steps in a row were skipped.
    """
    engine, rows, checkpoints = training.engine, training.rows, training.checkpoints
    settings, state, world = training.settings, training.state, training.world
    window = WindowSums(settings.num_depths, world.device)
    with Progress("train", settings.max_steps, "steps", initial=state.step, shown=world.is_main) as bar:
        rows.loader.read_ahead(state.step)
        if state.best_step is None or (
            state.step % settings.validate_every == 0 and state.validated_step != state.step
        ):
            validate(training, window)
        while state.step < settings.max_steps:
            logs, validates, saves = settings.due(state.step + 1)

            window.steps.begin()
            waited_before = rows.waited_seconds
            step_rows = rows.of_step(state.step)
            lr = settings.learning_rate.at(state.step)
            counts, norm = optimizer_step(
                engine,
                step_rows,
                lr,
                settings.max_grad_norm,
                window,
                world,
                with_metrics=logs,
                stop=stop_reason() is not None,
                lacking=rows.loader.gave_up,
            )
            window.steps.end()
            window.waited_seconds += rows.waited_seconds - waited_before
            num_supervised, num_stopping, num_lacking = counts.read()
            if num_lacking:  # the run that resumes trains the step
                stop(training, stop_reason())
            state.step += 1
            state.epoch, state.row = rows.loader.position(state.step)
            state.supervised_positions += num_supervised
            bar.update()

            stops = num_stopping > 0 and state.step < settings.max_steps
            training.skipped.record(state.step, ~norm.isfinite())
            report_skipped(training, wait=logs or validates or saves or stops)
            if logs:
                log(training, window, lr, float(norm), bar)
                window = WindowSums(settings.num_depths, world.device)
            if stops:  # there may be no time to validate; the run that resumes does it first
                stop(training, stop_reason())
            if validates:
                validate(training, window)
            if saves and not training.skipped.num_in_a_row:  # the weights may be useless
                with window.timed("checkpoint"):
                    checkpoints.save(engine, state)
        checkpoints.finish()


def optimizer_step(
    model_engine: deepspeed.DeepSpeedEngine,
    step_rows: StepRows,
    lr: float,
    max_grad_norm: float,
    window: WindowSums,
    world: World,
    *,
    with_metrics: bool,
    stop: bool = False,
    lacking: bool = False,
) -> tuple[HostCopy, Tensor]:
    """Run forward, backward and update over this rank's micro-batches.

    A step whose gradient is not finite changes nothing. The host does not wait for the device at ZeRO 0, 1
    and 2. At ZeRO 3, and where the optimizer is on the CPU, DeepSpeed waits.

    Args:
        max_grad_norm: norm to which the gradient is clipped.
        with_metrics: also compute `LOGGED_METRICS`, which need the target's full vocabulary.
        stop: whether this rank was asked to stop.
        lacking: whether its rows lack samples. The step then changes nothing on any rank.

    Returns:
        Over all ranks the number of supervised positions, of ranks that were asked to stop, and of those
        whose rows lack samples; and the gradient's norm before clipping, float32 [].
    """
    # One collective operation has all that the ranks need to know of each other.
    own = torch.tensor([step_rows.counts.num_supervised, int(stop), int(lacking)])
    counts = sum_over_ranks(to_device([own], world.device)[0])
    on_host = HostCopy(counts)
    window.count(step_rows.counts)

    # DeepSpeed averages over as many micro-batches as the largest step has, and at ZeRO 3 over ranks. But the
    # loss is a sum over all of them, divided once.
    averaged = model_engine.gradient_accumulation_steps()
    if model_engine.gradient_average:
        averaged *= world.size
    scale = averaged / counts[0].clamp(min=1).double()
    scale = scale.masked_fill(counts[2] > 0, torch.nan)
    norm = torch.empty(())
    for number, row in enumerate(step_rows.rows, start=1):
        last = number == step_rows.num_rows
        model_engine.set_gradient_accumulation_boundary(last)
        loss, sums = model_engine(row.batch, row.schedule, with_metrics)
        model_engine.backward(loss * scale.to(loss.dtype) * spoiled_unless_finite(loss))
        if last:
            divided = None if has_whole_gradient(model_engine) else world.device
            norm = clip_gradient(reduced_gradients(model_engine), max_grad_norm, divided)
            optimizer = model_engine.basic_optimizer
            optimizer.found_inf = (~norm.isfinite()).float()  # then it changes nothing
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_ratio"]
        model_engine.step()
        window.add(sums, with_metrics)
    return on_host, norm


def clip_gradient(gradients: Sequence[Tensor], max_norm: float, device: torch.device | None) -> Tensor:
    """Clip a gradient; return its norm before that, float32 [].

    Args:
        device: where the norms of the ranks' parts are added up, which every rank calls; None if each rank
            has the whole gradient.
    """
    norm = get_total_norm(gradients)
    if device is not None:
        norm = sum_over_ranks(norm.square().to(device)).sqrt().to(norm.device)
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm


def log(training: Training, window: WindowSums, lr: float, grad_norm: float, bar: Progress) -> None:
    """Log the metrics of the steps since the last record. Every rank calls."""
    with window.timed("checkpoint"):
        training.checkpoints.finish(wait=False)
    metrics = window.metrics(training.world, training.settings.speed)
    metrics["learning_rate"] = lr
    metrics["grad_norm"] = grad_norm if math.isfinite(grad_norm) else None
    if (stats := training.rows.loader.collect_stats()) is not None:
        metrics |= source_metrics(stats, training.world)
    training.tracker.log({"kind": "train", "step": training.state.step} | metrics)
    agreement = metrics["depth"][0]["agreement"]
    bar.note(f"loss {metrics['loss']:.3f}, first draft right {agreement:.3f}")
    training.state.step_seconds += sum(window.steps.seconds())


def validate(training: Training, window: WindowSums) -> None:
    """Validate by replay, save the weights if they are the best so far, and log their drift.

    Every rank calls.
    """
    state, started = training.state, time.perf_counter()
    with window.timed("validation"):
        stats = training.validation.run(training.engine.module)
        chosen = stats[training.settings.draft_tokens]
        record = {
            "acceptance_length": {str(k): one.acceptance_length for k, one in stats.items()},
            "num_drafts": chosen.num_drafts,
            "conditional_acceptance": list(chosen.conditional_acceptance),
            "seconds": time.perf_counter() - started,
        }
        training.tracker.log({"kind": "validation", "step": state.step} | record)
        if training.world.is_main:
            length = f"acceptance length {chosen.acceptance_length:.2f} at k = {chosen.k}"
            print(f"train: step {state.step}, {length} on the validation prompts", flush=True)
        state.validated_step = state.step
        # On a tie the later one, which has been trained for longer, is better.
        best = state.best_step is None or chosen.acceptance_length >= state.best_acceptance_length
        if best and not training.skipped.num_in_a_row:
            state.best_step, state.best_acceptance_length = state.step, chosen.acceptance_length
            weights = full_state(training.engine, keep=training.world.is_main)
            if training.world.is_main:
                training.checkpoints.save_best(weights, state)
    started = time.perf_counter()
    with window.timed("diagnosis"):
        drift = training.diagnosis.run(training.engine.module)
    if drift is not None:
        seconds = {"seconds": time.perf_counter() - started}
        training.tracker.log({"kind": "drift", "step": state.step} | drift | seconds)


def report_skipped(training: Training, *, wait: bool) -> None:
    """Log the skipped steps that the host knows of, with their samples."""
    skipped = training.skipped
    for step in skipped.collect(wait=wait):
        training.state.skipped_steps += 1
        if training.world.is_main:
            names = skipped.samples_of(step)
            training.tracker.log({"kind": "skipped", "step": step, "samples": names})
            problem = "its loss or gradient is not finite"
            print(f"train: step {step} is skipped: {problem}. Its samples: {', '.join(names)}", flush=True)
    skipped.check(training.checkpoints.newest())


def stop(training: Training, reason: str | None) -> NoReturn:
    """Save, and end the run. Every rank calls."""
    state, checkpoints = training.state, training.checkpoints
    report_skipped(training, wait=True)
    if state.step > checkpoints.saved_step:
        checkpoints.save(training.engine, state)
    checkpoints.finish()
    if training.world.is_main:
        print(f"train: saved after step {state.step} and stopped; the same command resumes")
    raise Stopped(state.step, reason)
