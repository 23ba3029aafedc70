"""The train stage: what its result depends on, its length and schedules, and the loop on every rank."""

import math
import os
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.batches.device_rows import DeviceRows
from data.batches.loader import RowPosition, check_divisible, check_enough, check_groups
from data.batches.row_order import pack_epoch
from data.capture.tokens import dataset_lengths
from data.samples import HiddenStateSource
from data.store import HiddenStateStore
from eagle31.errors import UserError
from eagle31.training.rollout import CHUNK_ROWS
from train.artifact import Artifact, has_trained
from train.config.capture import CaptureMode
from train.config.run import RunConfig, Stage, training_seed
from train.config.training import OptimConfig, Schedule, TrainConfig
from train.context import RunContext
from train.distributed import on_main_first, wait_for_ranks
from train.stages.training.building import (
    drift_diagnosis,
    expected_speed,
    new_drafter,
    new_engine,
    row_flops,
    row_loader,
    sample_names,
    shared_rows,
    step_dtype,
)
from train.stages.training.continuing import chosen_optim, keep_vocab, prepared, training_inputs
from train.stages.training.states import open_store, opened_source, training_samples
from train.stages.vocab import load_projected, load_vocab
from train.stop import stop_reasons, time_limit
from train.tracking import open_tracker
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.engine import ensure_process_group, release_memory, row_groups
from train.trainer.learning_rate import LearningRate
from train.trainer.loop import LoopSettings, TrainingLoop
from train.trainer.metrics import Speed
from train.trainer.skipped import SkippedSteps
from train.trainer.validation import ReplayValidation

_OPENED = "stages/train/opened"
# The part of the steps in which the rate falls under `wsd`; MiniCPM (arXiv 2404.06395) found a tenth enough.
_DECAY_FRACTION = 0.2
# Of a run, by default. A validation is a forward pass of the held-out samples; a crash costs a save's part.
_VALIDATIONS, _SAVES = 20, 50


def train_inputs(context: RunContext) -> dict[str, Any]:
    artifacts = context.artifacts
    keys = {"capture": artifacts[Stage.capture].key, "vocab": artifacts[Stage.vocab].key}
    return training_inputs(context.config, context.drafter, artifacts[Stage.data]) | keys


def run_train(context: RunContext, directory: Path) -> dict[str, Any]:
    """Train, into `checkpoints/` (the newest states, and `best/`) and `metrics.jsonl`."""
    held_out = open_store(context.artifacts[Stage.capture].directory / "validation", context.world)
    with opened_source(context) as source:
        wait_for_ranks(_OPENED, context.world)
        return train_on(source, held_out, context, directory)


def train_on(
    source: HiddenStateSource, held_out: HiddenStateStore, context: RunContext, directory: Path
) -> dict[str, Any]:
    """Build what training needs, and train.

    Raises:
        UserError: no step is left.
    """
    config, world, artifacts = context.config, context.world, context.artifacts
    optim, train_data = chosen_optim(config, context.drafter), training_samples(artifacts[Stage.data])
    engines = context.capturing if config.capture.mode is CaptureMode.online else None
    wait_seconds = 0.0 if engines is None else engines.patience_seconds
    ensure_process_group(wait_seconds)
    on_main_first(world.is_main, lambda: keep_vocab(artifacts[Stage.vocab], directory))
    vocab, projected = load_vocab(artifacts[Stage.vocab]), load_projected(directory)
    drafter, frozen = new_drafter(config, context.drafter, vocab, projected, world.device)
    tensors = {name: list(weight.shape) for name, weight in drafter.named_parameters()}
    speed = expected_speed(config, world, drafter.config, tensors)
    groups = row_groups(config.train.row_ranks, wait_seconds)
    engine = new_engine(config, optim, world, drafter, frozen, groups)
    checkpoints = CheckpointDirectory(directory / "checkpoints", config.train.keep_checkpoints, world)
    state = prepared(checkpoints.resume(engine), artifacts, config.evaluate.draft_tokens)
    begin = RowPosition(state.step, state.epoch, state.row)
    loader = row_loader(config, world, source, train_data, drafter.config, begin)
    max_steps = run_steps(config.train, loader.rows_per_epoch, state)
    settings = loop_settings(config, optim, state, max_steps, speed)
    checkpoints.always_kept = settings.saves_after
    if state.step and world.is_main:
        print(f"train: resuming after step {state.step} of {settings.max_steps}")
    validation = ReplayValidation(
        held_out,
        config.train.row_tokens,
        config.evaluate.draft_tokens,
        config.train.rollout_chunk or CHUNK_ROWS,
        world,
    )
    tracker = open_tracker(
        name=context.output_dir.name,
        config=asdict(config) | {"optim": asdict(optim)},
        directory=directory,
        resume_step=state.step,
        is_main=world.is_main,
    )
    rows = DeviceRows(
        loader,
        num_steps=config.train.ttt_steps,
        device=world.device,
        dtype=step_dtype(config),
        stop_step=settings.max_steps,
        key_reach=drafter.config.key_reach,
        chunk_rows=config.train.rollout_chunk,
        max_drafts=config.train.max_drafts_per_row,
        shared=shared_rows(config, drafter.config, groups),
        flops_of=row_flops(config, drafter.config) if speed.peak_flops is not None else None,
    )
    with closing(rows), tracker:
        loop = TrainingLoop(
            engine,
            rows,
            validation,
            drift_diagnosis(config, world, held_out),
            checkpoints,
            tracker,
            SkippedSteps(settings.learning_rate.peak, lambda step: sample_names(loader, step, train_data)),
            settings,
            state,
            world,
        )
        stop_at = time_limit(config.stop_after_minutes, os.environ, context.started)
        with stop_reasons(stop_at) as context.stop_reason:
            state = loop.run(context.stop_reason)
    release_memory(engine)
    return {
        "steps": state.step,
        "best_step": state.best_step,
        "best_validation_acceptance_length": state.best_acceptance_length,
        "supervised_positions": state.supervised_positions,
        "skipped_steps": state.skipped_steps,
        "continued_at": state.continued_at,
        "drafter_parameters": sum(map(math.prod, tensors.values())),
        "world_size": dist.get_world_size(),
    }


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
        num_depths=config.train.ttt_steps,
        log_every=config.train.log_every,
        validate_every=config.train.validate_every or math.ceil(steps / _VALIDATIONS),
        save_every=config.train.save_every or math.ceil(steps / _SAVES),
        draft_tokens=config.evaluate.draft_tokens,
        # From there the rate falls; a longer training continues from this checkpoint.
        saves_after=decay_start if optim.schedule is Schedule.wsd else None,
        speed=speed,
    )


def check_rows(config: RunConfig, data: Artifact) -> None:
    """Raise UserError if the tokenized data cannot fill the rows of a step, before the target runs."""
    train, lengths = config.train, dataset_lengths(training_samples(data))
    rows = pack_epoch(lengths, train.row_tokens, training_seed(config), epoch=0)
    check_enough(len(rows), train.row_tokens, train.rows_per_step)


def check_ranks(config: RunConfig, size: int) -> None:
    """Check that each rank has as many rows of a step, or say what empty ones a resumed training has.

    Raises:
        UserError: the rows cannot be divided equally, and there is no training to resume.
    """
    check_groups(size, config.train.row_ranks)
    try:
        check_divisible(config.train.rows_per_step, size, config.train.row_ranks)
    except UserError as error:
        if not has_trained(Path(config.output_dir)):
            raise
        print(
            f"train: the {error.value} rows of a step cannot be divided equally among {size} processes: "
            f"{-error.value % (size // config.train.row_ranks)} more rows are empty",  # type: ignore[operator]
            flush=True,
        )
