"""The training loop."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import deepspeed
import torch
from torch import Tensor, nn

from data.batches.loader import RowLoader, SourceStats
from data.progress import Progress
from eagle31.training.batch import PackedBatch
from eagle31.training.step import DepthSums, schedule_batch
from eagle31.training.supervision import supervised_drafts
from train.distributed import World, sum_over_ranks
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.learning_rate import learning_rate
from train.trainer.model_engine import full_state, partitioned
from train.trainer.tracking import Tracker
from train.trainer.validation import ReplayValidation


@dataclass(frozen=True)
class LoopSettings:
    """How long and how often."""

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
    """SIGTERM arrived; the state is saved and the same command goes on from there."""


@contextmanager
def preemption_flag() -> Iterator[list[bool]]:
    """A list whose one entry turns true at SIGTERM."""
    flag = [False]

    def raise_flag(*_: object) -> None:
        flag[0] = True

    before = signal.signal(signal.SIGTERM, raise_flag)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGTERM, before)


MEASURED = ("agreement", "expected_acceptance")  # of the logging steps alone


class WindowSums:
    """What is logged every few steps: sums of sums, divided once after the all-reduce."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(fields(DepthSums)), num_depths, dtype=torch.float64, device=device)
        self.measured_rows = self.sums.new_zeros(num_depths)
        self.started = time.perf_counter()
        self.num_tokens = 0
        self.waited_seconds = 0.0
        self.step_seconds = 0.0  # with the waiting; without validation and checkpoints

    def add(self, sums: DepthSums, measured: bool, num_tokens: int) -> None:
        """One micro-batch; `measured` says whether agreement and expected acceptance are in the sums."""
        self.sums += sums.stacked()
        self.num_tokens += num_tokens
        if measured:
            self.measured_rows += sums.num_rows

    def record(self, world: World, step_decay: float) -> dict:
        """Every rank calls."""
        num_rows, *totals = sum_over_ranks(self.sums.clone())
        measured_rows = sum_over_ranks(self.measured_rows.clone())
        own = [self.num_tokens, self.waited_seconds, self.step_seconds]
        num_tokens, waited, step_seconds = gather(own, world).unbind(1)
        slowest = int(waited.argmax())
        seconds = time.perf_counter() - self.started
        names = [f.name for f in fields(DepthSums)][1:]
        counts = [measured_rows if name in MEASURED else num_rows for name in names]
        means = [(total / rows.clamp(min=1)).tolist() for total, rows in zip(totals, counts, strict=True)]
        depth = [
            dict(zip(names, values, strict=True)) | {"num_rows": int(rows)}
            for rows, *values in zip(num_rows.tolist(), *means, strict=True)
        ]
        weighted = sum(step_decay**k * float(total) for k, total in enumerate(totals[0]))
        return {
            "loss": weighted / max(float(num_rows[0]), 1.0),
            "depth": depth,
            "counted_tokens": int(num_rows[0]),
            "tokens_per_second": float(num_tokens.sum()) / seconds,
            "seconds": seconds,
            # Of the rank that waited longest: the others wait for it.
            "data_wait_seconds": float(waited[slowest]),
            "data_wait_fraction": float(waited[slowest] / step_seconds[slowest].clamp(min=1e-9)),
        }


def gather(values: Sequence[float], world: World) -> Tensor:
    """float64 [num_ranks, num_values]. Every rank calls."""
    table = torch.zeros(world.size, len(values), dtype=torch.float64, device=world.device)
    table[world.rank] = torch.tensor(values, dtype=torch.float64)
    return sum_over_ranks(table)


def source_metrics(stats: SourceStats, world: World) -> dict[str, float]:
    """How online states came, over all ranks. Every rank calls."""
    own = [stats.waiting_bytes, stats.starved_seconds, stats.full_seconds, stats.num_restarts]
    waiting, starved, full, restarts = gather(own, world).unbind(1)
    return {
        "spool_gb": float(waiting.sum()) / 1e9,
        "starved_seconds": float(starved.max()),
        "spool_full_seconds": float(full.max()),
        "producer_restarts": int(restarts.sum()),
    }


def train(
    engine: deepspeed.DeepSpeedEngine,
    loader: RowLoader,
    validation: ReplayValidation,
    checkpoints: CheckpointDirectory,
    tracker: Tracker,
    settings: LoopSettings,
    state: TrainState,
    world: World,
    dtype: torch.dtype,
) -> TrainState:
    """Runs from `state.step` to `settings.max_steps`; leaves the best weights in `checkpoints`.

    Raises:
        Preempted: SIGTERM arrived; a checkpoint is saved.
    """
    module, device = engine.module, world.device
    bar = Progress("train", settings.max_steps, "steps", initial=state.step, shown=world.is_main)
    window = WindowSums(settings.num_depths, device)
    with preemption_flag() as preempted, bar:
        loader.read_ahead(state.step)
        if state.step == 0:
            validate(engine, validation, checkpoints, tracker, settings, state, world, dtype)
        while state.step < settings.max_steps:
            waiting = time.perf_counter()
            batches = loader.batches(state.step)
            window.waited_seconds += time.perf_counter() - waiting
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
            num_supervised, grad_norm = optimizer_step(
                engine, batches, lr, window, world, dtype, with_metrics=logs
            )
            window.step_seconds += time.perf_counter() - waiting
            state.supervised_positions += num_supervised
            bar.update()
            if logs:
                record = window.record(world, module.step_decay)
                record |= {"learning_rate": lr, "grad_norm": float(grad_norm)}
                if (stats := loader.collect_stats()) is not None:
                    record |= source_metrics(stats, world)
                tracker.log({"kind": "train", "step": state.step} | record)
                bar.note(
                    f"loss {record['loss']:.3f}, first draft right {record['depth'][0]['agreement']:.3f}"
                )
                window = WindowSums(settings.num_depths, device)
            if state.step % settings.validate_every == 0 or state.step == settings.max_steps:
                validate(engine, validation, checkpoints, tracker, settings, state, world, dtype)
            stop = any_rank(preempted[0], device)
            if stop or state.step % settings.save_every == 0 or state.step == settings.max_steps:
                checkpoints.save(engine, state)
            if stop and state.step < settings.max_steps:
                if world.is_main:
                    print(f"stopped at step {state.step} and saved; the same command goes on from there")
                raise Preempted(143)
    return state


def optimizer_step(
    engine: deepspeed.DeepSpeedEngine,
    batches: list[PackedBatch],
    lr: float,
    window: WindowSums,
    world: World,
    dtype: torch.dtype,
    *,
    with_metrics: bool,
) -> tuple[int, Tensor | float]:
    """Forward, backward and update over this rank's micro-batches.

    Args:
        with_metrics: agreement and expected acceptance too, which need the target's whole vocabulary.

    Returns:
        The counted rows of all ranks, and the gradient's norm before clipping.
    """
    device, num_steps = world.device, engine.module.num_steps
    local = sum(int(supervised_drafts(b.loss_mask, b.document_ids, 1).sum()) for b in batches)
    num_supervised = int(sum_over_ranks(torch.tensor(local, device=device)))
    # DeepSpeed averages over micro-batches and ranks; the loss is a sum over all of them, divided once.
    scale = len(batches) * world.size / max(num_supervised, 1)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    grad_norm: Tensor | float = 0.0
    for batch in batches:
        plan = schedule_batch(batch, num_steps, device)
        loss, sums = engine(batch.to(device, dtype), plan, with_metrics)
        engine.backward(loss * scale)
        if engine.is_gradient_accumulation_boundary() and not partitioned(engine):
            # DeepSpeed's plain path clips and does not tell the norm.
            grad_norm = nn.utils.get_total_norm([p.grad for p in engine.module.parameters()])
        engine.step()
        window.add(sums, with_metrics, batch.input_ids.shape[0])
    return num_supervised, engine.get_global_grad_norm() if partitioned(engine) else grad_norm


def validate(
    engine: deepspeed.DeepSpeedEngine,
    validation: ReplayValidation,
    checkpoints: CheckpointDirectory,
    tracker: Tracker,
    settings: LoopSettings,
    state: TrainState,
    world: World,
    dtype: torch.dtype,
) -> None:
    """Measures by replay, and keeps the weights when they are the best so far. Every rank calls."""
    stats = validation.run(engine.module, world.device, dtype)
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
        weights = full_state(engine)
        if world.is_main:
            checkpoints.save_best(weights, state)


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank when it is true on one. Every rank calls."""
    raised: Tensor = sum_over_ranks(torch.tensor(int(flag), device=device))
    return bool(raised)
