"""Finding learning rates by short runs on captured states, for `scripts/find_lr`."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from data.batches.device_rows import DeviceRows
from data.batches.loader import RowPosition
from data.batches.row_schedule import RowSchedule
from data.samples import HiddenStateSource
from eagle31.errors import UserError
from eagle31.kernels.compiled import use_compiled
from train.config.capture import CaptureMode
from train.config.run import RunConfig, Stage
from train.config.training import MAX_LR, Optimizer
from train.context import RunContext
from train.optim.short_runs import (
    FoundRate,
    ShortRun,
    best_rate,
    bracketing_runs,
    rate_of_step,
    rounded,
    scaled_rate,
)
from train.stages.train import steps_of_epochs
from train.stages.training.building import new_drafter, new_engine, num_rows_per_epoch, row_loader
from train.stages.training.states import open_source
from train.stages.vocab import load_vocab
from train.trainer.checkpoints import TrainState
from train.trainer.loop import optimizer_step
from train.trainer.model_engine import ensure_process_group, release_memory
from train.trainer.window import WindowSums

FACTOR = 3.0  # between the rates of two runs
LOWEST = 1e-6


def check_stored(config: RunConfig) -> None:
    """Raise UserError if captured states are not stored, before any stage runs."""
    if config.capture.mode is not CaptureMode.offline:
        raise UserError(
            "capture.mode", config.capture.mode.value, "Short runs read states again; give offline."
        )


def find_rates(context: RunContext, num_steps: int) -> list[FoundRate]:
    """Return the short runs and the suggested value of each setting.

    With Muon the rate of the matrices is searched first, because they are nearly all weights, and then that
    of AdamW at the value found. If both grew together, the first to diverge would hide the other.

    Args:
        num_steps: of each short run.

    Raises:
        UserError: no rate between the limits is better than its neighbors.
    """
    ensure_process_group(context.config.deepspeed.timeout_minutes)
    use_compiled("inductor" if context.config.train.compile else None)
    source = open_source(context)
    names = ["lr"] if context.config.optim.name is Optimizer.adamw else ["matrix_lr", "lr"]
    max_steps = _max_steps(context, source)
    found = []
    for name in names:
        start = getattr(context.optim, name)
        runs = bracketing_runs(
            _short_run(context, source, name, num_steps), start, factor=FACTOR, lowest=LOWEST, highest=MAX_LR
        )
        best = best_rate(runs)
        if best is None:
            tried = f"{runs[0].rate:.1e} to {runs[-1].rate:.1e}"
            raise UserError(f"optim.{name}", start, f"No rate from {tried} is best: give more --steps.")
        _set(context, name, best)
        suggested = rounded(scaled_rate(best, num_steps, max_steps, of_matrices=name == "matrix_lr"))
        found.append(FoundRate(name, tuple(runs), best, suggested))
    return found


def _max_steps(context: RunContext, source: HiddenStateSource) -> int:
    train = context.config.train
    if train.max_steps is not None:
        return train.max_steps
    return steps_of_epochs(train, num_rows_per_epoch(context, source, epoch=0), TrainState())


def _short_run(
    context: RunContext, source: HiddenStateSource, name: str, num_steps: int
) -> Callable[[float], ShortRun]:
    def run(rate: float) -> ShortRun:
        started = time.perf_counter()
        _set(context, name, rate)
        done = ShortRun(rate, tuple(_losses(context, source, num_steps)))
        seconds = time.perf_counter() - started
        if context.world.is_main:
            loss = f"final loss {done.final_loss:.3f}"
            print(f"find_lr: optim.{name}={rate:.1e}: {loss}, {seconds:.0f} s", flush=True)
        return done

    return run


def _losses(context: RunContext, source: HiddenStateSource, num_steps: int) -> list[float]:
    """Train a new drafter on the run's first rows, and return the loss of each step."""
    train, world = context.config.train, context.world
    drafter, frozen = new_drafter(context, load_vocab(context.artifacts[Stage.vocab]))
    engine = new_engine(context, drafter, frozen, source)
    loader = row_loader(context, source, drafter.config, RowSchedule(train.rows_per_step), RowPosition())
    rows = DeviceRows(
        loader,
        num_steps=lambda step: train.ttt_steps,
        device=world.device,
        dtype=context.dtype,
        stop_step=num_steps,
        key_reach=drafter.config.key_reach,
    )
    losses: list[float] = []
    peak = context.optim.lr
    assert peak is not None
    try:
        for step in range(num_steps):
            window = WindowSums(train.ttt_steps, world.device)
            rate = rate_of_step(step, peak, num_steps)
            optimizer_step(engine, rows.of_step(step), rate, window, world, with_metrics=False)
            losses.append(window.metrics(world)["loss"])
            if not math.isfinite(losses[-1]):
                break
    finally:
        loader.close()
        rows.close()
    release_memory(engine)
    return losses


def _set(context: RunContext, name: str, rate: float) -> None:
    """Set a learning rate. The other one keeps its value, which the engine gets as a ratio of the two."""
    optim = replace(context.optim)
    setattr(optim, name, rate)
    context.optim = optim
