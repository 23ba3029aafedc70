"""The training loop."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from data.batches.device_rows import DeviceRows, StepRows
from data.batches.loader import RowLoader, SourceStats
from data.progress import Progress
from eagle31.training.step import DepthSums
from train.distributed import World, sum_over_ranks
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.host_copy import HostCopy, sent
from train.trainer.learning_rate import learning_rate
from train.trainer.model_engine import full_state, partitioned
from train.trainer.tracking import Tracker
from train.trainer.validation import ReplayValidation


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
    draft_tokens: int  # k of the acceptance length that chooses the checkpoint


class Preempted(SystemExit):
    """Raised after SIGTERM, once the state is saved; the same command resumes from it."""


@contextmanager
def preemption_flag() -> Iterator[list[bool]]:
    """Yield a list whose only entry becomes true on SIGTERM."""
    flag = [False]

    def raise_flag(*_: object) -> None:
        flag[0] = True

    before = signal.signal(signal.SIGTERM, raise_flag)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGTERM, before)


LOGGED_METRICS = ("agreement", "expected_acceptance")  # computed at logging steps only


class WindowSums:
    """Sums since the last logged step; they are divided once, after the all-reduce."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(fields(DepthSums)), num_depths, dtype=torch.float64, device=device)
        self.metric_rows = self.sums.new_zeros(num_depths)
        self.started = time.perf_counter()
        self.num_tokens = 0
        self.waited_seconds = 0.0
        self.step_seconds = 0.0  # includes the waiting, but neither validation nor checkpoints

    def add(self, sums: DepthSums, with_metrics: bool) -> None:
        """Adds one micro-batch; `with_metrics` says whether its sums include `LOGGED_METRICS`."""
        self.sums += sums.stacked()
        if with_metrics:
            self.metric_rows += sums.num_rows

    def metrics(self, world: World, step_decay: float) -> dict[str, Any]:
        """Return the metrics of the window over all ranks. Every rank calls."""
        num_rows, *totals = sum_over_ranks(self.sums.clone())
        metric_rows = sum_over_ranks(self.metric_rows.clone())
        local = [self.num_tokens, self.waited_seconds, self.step_seconds]
        num_tokens, waited, step_seconds = gather(local, world).unbind(1)
        slowest = int(waited.argmax())
        seconds = time.perf_counter() - self.started
        names = [f.name for f in fields(DepthSums)][1:]
        counts = [metric_rows if name in LOGGED_METRICS else num_rows for name in names]
        means = [(total / rows.clamp(min=1)).tolist() for total, rows in zip(totals, counts, strict=True)]
        depth = [
            dict(zip(names, values, strict=True)) | {"num_rows": int(rows)}
            for rows, *values in zip(num_rows.tolist(), *means, strict=True)
        ]
        weighted = sum(step_decay**k * float(total) for k, total in enumerate(totals[0]))
        return {
            "loss": weighted / max(float(num_rows[0]), 1.0),
            "depth": depth,
            "supervised_positions": int(num_rows[0]),
            "tokens_per_second": float(num_tokens.sum()) / seconds,
            "seconds": seconds,
            # From the rank that waited longest, because the others wait for it.
            "data_wait_seconds": float(waited[slowest]),
            "data_wait_fraction": float(waited[slowest] / step_seconds[slowest].clamp(min=1e-9)),
        }


def gather(values: Sequence[float], world: World) -> Tensor:
    """Return every rank's values. float64 [num_ranks, num_values]. Every rank calls."""
    table = torch.zeros(world.size, len(values), dtype=torch.float64, device=world.device)
    table[world.rank] = torch.tensor(values, dtype=torch.float64)
    return sum_over_ranks(table)


def source_metrics(stats: SourceStats, world: World) -> dict[str, float]:
    """Return how the states of online capture arrived, over all ranks. Every rank calls."""
    local = [stats.waiting_bytes, stats.starved_seconds, stats.full_seconds, stats.num_restarts]
    waiting, starved, full, restarts = gather(local, world).unbind(1)
    return {
        "spool_gb": float(waiting.sum()) / 1e9,
        "starved_seconds": float(starved.max()),
        "spool_full_seconds": float(full.max()),
        "producer_restarts": int(restarts.sum()),
    }


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
) -> TrainState:
    """Trains from `state.step` to `settings.max_steps`; leaves the best weights in `checkpoints`.

    Raises:
        Preempted: SIGTERM arrived and a checkpoint is saved.
    """
    module, device = model_engine.module, world.device
    bar = Progress("train", settings.max_steps, "steps", initial=state.step, shown=world.is_main)
    window = WindowSums(settings.num_depths, device)
    with preemption_flag() as preempted, bar:
        loader.read_ahead(state.step)
        if state.step == 0:
            validate(model_engine, validation, checkpoints, tracker, settings, state, world, dtype)
        while state.step < settings.max_steps:
            started, waited_before = time.perf_counter(), rows.waited_seconds
            step_rows = rows.of_step(state.step)
            lr = learning_rate(
                state.step,
                peak=settings.peak_lr,
                schedule=settings.schedule,
                warmup_steps=settings.warmup_steps,
                max_steps=settings.max_steps,
                min_fraction=settings.min_lr_fraction,
            )
            state.step += 1
            logs = state.step % settings.log_every == 0 or state.step == settings.max_steps
            counts, grad_norm = optimizer_step(
                model_engine, step_rows, lr, window, world, with_metrics=logs, stop=preempted[0]
            )
            num_supervised, num_stopping = counts.read()
            window.step_seconds += time.perf_counter() - started
            window.waited_seconds += rows.waited_seconds - waited_before
            state.supervised_positions += num_supervised
            bar.update()
            if logs:
                metrics = window.metrics(world, module.step_decay)
                metrics |= {"learning_rate": lr, "grad_norm": float(grad_norm)}
                if (stats := loader.collect_stats()) is not None:
                    metrics |= source_metrics(stats, world)
                tracker.log({"kind": "train", "step": state.step} | metrics)
                bar.note(
                    f"loss {metrics['loss']:.3f}, first draft right {metrics['depth'][0]['agreement']:.3f}"
                )
                window = WindowSums(settings.num_depths, device)
            if state.step % settings.validate_every == 0 or state.step == settings.max_steps:
                validate(model_engine, validation, checkpoints, tracker, settings, state, world, dtype)
            stop = num_stopping > 0
            if stop or state.step % settings.save_every == 0 or state.step == settings.max_steps:
                checkpoints.save(model_engine, state)
            if stop and state.step < settings.max_steps:
                if world.is_main:
                    print(f"train: saved after step {state.step} and stopped; the same command resumes")
                raise Preempted(143)
    return state


def optimizer_step(
    model_engine: deepspeed.DeepSpeedEngine,
    step_rows: StepRows,
    lr: float,
    window: WindowSums,
    world: World,
    *,
    with_metrics: bool,
    stop: bool = False,
) -> tuple[HostCopy, Tensor | float]:
    """Runs forward, backward and update over this rank's micro-batches.

    The host does not wait for the device. One collective operation has all that the ranks need to know of
    each other.

    Args:
        with_metrics: also computes `LOGGED_METRICS`, which need the target's full vocabulary.
        stop: whether this rank was told to stop.

    Returns:
        Over all ranks the number of supervised positions and the number of ranks that were told to stop; and
        the gradient's norm before clipping.
    """
    counts = sum_over_ranks(sent([step_rows.counts.num_supervised, stop], world.device))
    # DeepSpeed averages over micro-batches and ranks, but the loss is a sum over all of them, divided once.
    scale = step_rows.num_rows * world.size / counts[0].clamp(min=1).double()
    on_host = HostCopy(counts)
    for group in model_engine.optimizer.param_groups:
        group["lr"] = lr
    grad_norm: Tensor | float = 0.0
    window.num_tokens += step_rows.counts.num_tokens
    for row in step_rows.rows:
        loss, sums = model_engine(row.batch, row.schedule, with_metrics)
        model_engine.backward(loss * scale.to(loss.dtype))
        if model_engine.is_gradient_accumulation_boundary() and not partitioned(model_engine):
            # Without ZeRO and bf16, DeepSpeed clips the gradient and does not report its norm.
            grad_norm = nn.utils.get_total_norm([p.grad for p in model_engine.module.parameters()])
        model_engine.step()
        window.add(sums, with_metrics)
    return on_host, model_engine.get_global_grad_norm() if partitioned(model_engine) else grad_norm


def validate(
    model_engine: deepspeed.DeepSpeedEngine,
    validation: ReplayValidation,
    checkpoints: CheckpointDirectory,
    tracker: Tracker,
    settings: LoopSettings,
    state: TrainState,
    world: World,
    dtype: torch.dtype,
) -> None:
    """Validates by replay and saves the weights if they are the best so far. Every rank calls."""
    stats = validation.run(model_engine.module, world.device, dtype)
    chosen = stats[settings.draft_tokens]
    tracker.log(
        {
            "kind": "validation",
            "step": state.step,
            "acceptance_length": {str(k): one.acceptance_length for k, one in stats.items()},
            "num_drafts": chosen.num_drafts,
            "conditional_acceptance": list(chosen.conditional_acceptance),
        }
    )
    if state.best_step is None or chosen.acceptance_length > state.best_acceptance_length:
        state.best_step, state.best_acceptance_length = state.step, chosen.acceptance_length
        weights = full_state(model_engine, keep=world.is_main)
        if world.is_main:
            checkpoints.save_best(weights, state)
