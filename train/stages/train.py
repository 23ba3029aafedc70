"""The train stage: what its result depends on, and what it trains with."""

import math
import os
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.batches.device_rows import DeviceRows
from data.batches.loader import RowPosition, check_divisible, check_enough, check_groups
from data.batches.row_order import pack_epoch
from data.capture.tokens import dataset_lengths
from data.samples import HiddenStateSource
from data.store import HiddenStateStore
from eagle31.errors import UserError
from eagle31.training.drift import MIN_STEPS
from eagle31.training.rollout import CHUNK_ROWS
from train.artifact import Artifact, has_trained
from train.config.capture import CaptureMode
from train.config.run import RunConfig, Stage, training_seed
from train.context import RunContext
from train.distributed import on_main_first, wait_for_ranks
from train.drafter.build import build_drafter
from train.stages.building import (
    expected_speed,
    new_engine,
    row_flops,
    row_loader,
    sample_names,
    shared_rows,
    step_dtype,
)
from train.stages.continuing import keep_vocab, prepared
from train.stages.states import open_store, opened_source, training_samples
from train.stages.training_inputs import chosen_optim, training_inputs
from train.stages.vocab import load_projected, load_vocab
from train.stop import Stopped, stop_reasons, time_limit
from train.tracking import open_tracker
from train.trainer.checkpoints import CheckpointDirectory
from train.trainer.engine import release_memory
from train.trainer.engine_state import weight_shapes
from train.trainer.process_groups import ensure_process_group, row_groups
from train.trainer.settings import loop_settings, run_steps
from train.trainer.skipped import SkippedSteps
from train.trainer.train import Training, train_loop
from train.trainer.validation import DriftDiagnosis, ReplayValidation


def train_inputs(context: RunContext) -> dict[str, Any]:
    artifacts = context.artifacts
    keys = {"capture": artifacts[Stage.capture].key, "vocab": artifacts[Stage.vocab].key}
    return training_inputs(context.config, context.drafter, artifacts[Stage.data]) | keys


def run_train(context: RunContext, directory: Path) -> dict[str, Any]:
    """Train, into `checkpoints/` (the newest states, and `best/`) and `metrics.jsonl`."""
    held_out = open_store(context.artifacts[Stage.capture].directory / "validation", context.world)
    with opened_source(context) as source:
        wait_for_ranks(context.world)
        training = built(source, held_out, context, directory)
        stop_at = time_limit(context.config.stop_after_minutes, os.environ, context.started)
        with closing(training.rows), training.tracker, stop_reasons(stop_at) as context.stop_reason:
            try:
                train_loop(training, context.stop_reason)
            except Stopped as stopped:
                if context.world.is_main:  # now: W&B and engines take time to end, which may be up
                    stopped.write(context.output_dir)
                raise
        num_parameters = sum(map(math.prod, weight_shapes(training.engine).values()))
        release_memory(training.engine)
    state = training.state
    return {
        "steps": state.step,
        "best_step": state.best_step,
        "best_validation_acceptance_length": state.best_acceptance_length,
        "supervised_positions": state.supervised_positions,
        "skipped_steps": state.skipped_steps,
        "continued_at": state.continued_at,
        "drafter_parameters": num_parameters,
        "world_size": context.world.size,
    }


def built(
    source: HiddenStateSource, held_out: HiddenStateStore, context: RunContext, directory: Path
) -> Training:
    """Build what training needs, and load the newest checkpoint. Every rank calls.

    Raises:
        UserError: no step is left.
    """
    config, world, artifacts = context.config, context.world, context.artifacts
    optim, samples = chosen_optim(config, context.drafter), training_samples(artifacts[Stage.data])
    engines = context.capturing if config.capture.mode is CaptureMode.online else None
    wait_seconds = 0.0 if engines is None else engines.patience_seconds
    ensure_process_group(wait_seconds)
    groups = row_groups(config.train.row_ranks, wait_seconds)

    on_main_first(world.is_main, lambda: keep_vocab(artifacts[Stage.vocab], directory))
    vocab, projected = load_vocab(artifacts[Stage.vocab]), load_projected(directory)
    drafter, frozen = build_drafter(
        config, context.drafter, vocab, projected, world.device, step_dtype(config)
    )
    speed = expected_speed(config, world, drafter)
    engine = new_engine(config, optim, world, drafter, frozen, groups)

    checkpoints = CheckpointDirectory(directory / "checkpoints", config.train.keep_checkpoints, world)
    state = prepared(checkpoints.resume(engine), artifacts, config.evaluate.draft_tokens)
    begin = RowPosition(state.step, state.epoch, state.row)
    loader = row_loader(config, world, source, samples, drafter.config, begin)
    max_steps = run_steps(config.train, loader.rows_per_epoch, state)
    settings = loop_settings(config, optim, state, max_steps, speed)
    checkpoints.always_kept = settings.saves_after
    if state.step and world.is_main:
        print(f"train: resuming after step {state.step} of {settings.max_steps}")

    row_tokens, num_steps = config.train.row_tokens, config.train.ttt_steps
    chunk_rows, draft_tokens = config.train.rollout_chunk, config.evaluate.draft_tokens
    return Training(
        engine=engine,
        rows=DeviceRows(
            loader,
            num_steps=num_steps,
            device=world.device,
            dtype=step_dtype(config),
            stop_step=settings.max_steps,
            key_reach=drafter.config.key_reach,
            chunk_rows=chunk_rows,
            max_drafts=config.train.max_drafts_per_row,
            shared=shared_rows(config, drafter.config, groups),
            flops_of=row_flops(config, drafter.config) if speed.peak_flops is not None else None,
        ),
        validation=ReplayValidation(held_out, row_tokens, draft_tokens, chunk_rows or CHUNK_ROWS, world),
        diagnosis=DriftDiagnosis(held_out, row_tokens, max(MIN_STEPS, num_steps, draft_tokens), world),
        checkpoints=checkpoints,
        tracker=open_tracker(
            name=context.output_dir.name,
            config=asdict(config) | {"optim": asdict(optim)},
            directory=directory,
            resume_step=state.step,
            is_main=world.is_main,
        ),
        skipped=SkippedSteps(settings.learning_rate.peak, lambda step: sample_names(loader, step, samples)),
        settings=settings,
        state=state,
        world=world,
    )


def check_rows(config: RunConfig, data: Artifact) -> None:
    """Raise UserError if the tokenized data cannot fill the rows of a step, before the target runs."""
    train, lengths = config.train, dataset_lengths(training_samples(data))
    rows = pack_epoch(lengths, train.row_tokens, training_seed(config), epoch=0)
    check_enough(len(rows), train.row_tokens, train.rows_per_step)


def check_ranks(config: RunConfig, size: int, training: Path) -> None:
    """Check that each rank has as many rows of a step, or say what empty ones a resumed training has.

    Args:
        training: the directory of the training.

    Raises:
        UserError: the rows cannot be divided equally, and there is no training to resume.
    """
    check_groups(size, config.train.row_ranks)
    try:
        check_divisible(config.train.rows_per_step, size, config.train.row_ranks)
    except UserError as error:
        if not has_trained(training):
            raise
        print(
            f"train: the {error.value} rows of a step cannot be divided equally among {size} processes: "
            f"{-error.value % (size // config.train.row_ranks)} more rows are empty",  # type: ignore[operator]
            flush=True,
        )
