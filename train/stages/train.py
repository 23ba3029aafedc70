"""The train stage: builds the drafter, the model engine and the loader, and runs the loop on every rank."""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from data.batches.device_rows import DeviceRows
from data.batches.loader import RowLoader, RowPosition, check_enough
from data.batches.packing import pack_epoch
from data.capture.tokens import dataset_lengths, dataset_supervision
from data.samples import HiddenStateSource
from data.store import HiddenStateStore
from eagle31.cost.devices import peak_bf16_flops
from eagle31.cost.flops import count_step, sample_flops, step_flops
from eagle31.errors import UserError
from eagle31.kernels.compiled import use_compiled
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.vocab import DraftVocab
from eagle31.training.batch import PackedBatch
from eagle31.training.curriculum import rollout_steps
from train.artifact import Artifact, fingerprint
from train.config.run import Stage
from train.config.training import OptimConfig, Optimizer, Schedule, TrainConfig, objective_of
from train.context import RunContext
from train.distributed import World, on_main_first, wait_for_ranks
from train.drafter.build import build_drafter
from train.planning.memory import trainer_memory, worst_counts
from train.planning.sizes import trainer_settings
from train.stages.capture import open_store, opened_source, training_samples
from train.stages.continuing import CHANGEABLE_OPTIM, fixed_inputs, plain
from train.stages.vocab import load_vocab
from train.trainer.average import WeightAverage
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.continuation import VOCAB
from train.trainer.guard import StepGuard
from train.trainer.loop import LoopSettings, train
from train.trainer.model_engine import (
    TrainedModule,
    deepspeed_config,
    ensure_process_group,
    initialize_model_engine,
    release_memory,
)
from train.trainer.muon import MuonSettings
from train.trainer.tracking import open_tracker
from train.trainer.validation import ReplayValidation
from train.trainer.window import Speed

_OPENED = "stages/train/opened"


def train_inputs(context: RunContext) -> dict[str, Any]:
    config = context.config
    training = asdict(config.train)
    # These change no weights. validate_every stays in: it affects which step is chosen as the best.
    for name in (
        "log_every",
        "save_every",
        "keep_checkpoints",
        "continue_from",
        "keep_weights_every",
        "seed",
    ):
        training.pop(name)
    optim = {name: value for name, value in asdict(context.optim).items() if name in CHANGEABLE_OPTIM}
    optim.pop("max_skipped_steps")
    return {
        "fixed": fixed_inputs(context),
        "capture": context.artifacts[Stage.capture].key,
        "max_samples": config.capture.max_samples,
        "vocab": context.artifacts[Stage.vocab].key,
        "optim": plain(optim),
        "train": plain(training),
        "draft_tokens": config.evaluate.draft_tokens,
    }


def order_key(inputs: dict[str, Any]) -> str:
    """Return a fingerprint of what the order of the training rows depends on, apart from the seed."""
    return fingerprint(
        {name: inputs[name] for name in ("capture", "max_samples")}
        | {"row_tokens": inputs["train"]["row_tokens"]}
    )


def validation_key(context: RunContext) -> str:
    """Return a fingerprint of what the acceptance length in validation depends on, apart from the drafter."""
    # Without `max_samples`, because another number of training samples leaves the held-out prompts.
    answers = context.artifacts[Stage.answers].key
    return fingerprint({"answers": answers, "draft_tokens": context.config.evaluate.draft_tokens})


def run_train(context: RunContext, directory: Path) -> dict[str, Any]:
    """Train, into `checkpoints/` (the newest states, and `best/`) and `metrics.jsonl`."""
    held_out = open_store(context, "validation")
    with opened_source(context) as source:
        wait_for_ranks(_OPENED, context.world)
        return train_on(source, held_out, context, directory)


def train_on(
    source: HiddenStateSource, held_out: HiddenStateStore, context: RunContext, directory: Path
) -> dict[str, Any]:
    """Build what training needs, and train.

    Raises:
        UserError: the training to continue has another draft vocabulary, or no step is left.
    """
    config, world = context.config, context.world
    ensure_process_group(config.deepspeed.timeout_minutes)
    use_compiled("inductor" if config.train.compile else None)
    keep_vocab(context.artifacts[Stage.vocab], directory, world)
    drafter, frozen = new_drafter(context, load_vocab(context.artifacts[Stage.vocab]))
    tensors = {name: list(weight.shape) for name, weight in drafter.named_parameters()}
    speed = expected_speed(context, drafter.config, tensors)
    engine = new_engine(context, drafter, frozen, source)
    checkpoints = CheckpointDirectory(directory / "checkpoints", config.train.keep_checkpoints, world)
    check_world_size(checkpoints, world.size)
    average = None if config.train.ema_decay is None else WeightAverage(engine, config.train.ema_decay)
    state = prepared(checkpoints.resume(engine, average), context)
    begin = RowPosition(state.step, state.epoch, state.row)
    loader = row_loader(context, source, drafter.config, begin)
    settings = loop_settings(context, state, loader.rows_per_epoch, speed)
    checkpoints.always_kept = settings.decay_start if settings.schedule == Schedule.wsd.value else None
    if state.step and world.is_main:
        print(f"train: resuming after step {state.step} of {settings.max_steps}")
    validation = ReplayValidation(
        held_out.get_many(range(len(held_out))), config.train.row_tokens, config.evaluate.draft_tokens, world
    )
    tracker = open_tracker(
        config.tracking.mode,
        project=config.tracking.project,
        name=config.tracking.name or config.recipe_name,
        config=_tracked_config(context),
        directory=directory,
        metrics_path=directory / "metrics.jsonl",
        resume_step=state.step,
        is_main=world.is_main,
    )
    rows = DeviceRows(
        loader,
        num_rows=config.train.rows_per_step // world.size,
        num_steps=rollout_curriculum(config.train, state, settings.max_steps),
        device=world.device,
        dtype=context.dtype,
        stop_step=settings.max_steps,
        flops_of=row_flops(context, drafter.config) if speed.peak_flops is not None else None,
    )
    try:
        state = train(
            engine,
            loader,
            rows,
            validation,
            checkpoints,
            tracker,
            settings,
            state,
            world,
            context.dtype,
            average,
        )
    finally:
        tracker.close()
        loader.close()
        rows.close()
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


def new_engine(
    context: RunContext, drafter: Drafter, frozen: FrozenParts, source: HiddenStateSource
) -> deepspeed.DeepSpeedEngine:
    """Return the model engine around a drafter before its first step. Every rank calls."""
    config, optim, world = context.config, context.optim, context.world
    assert optim.lr is not None  # from `with_rates`
    module = TrainedModule(
        drafter,
        frozen,
        config.train.ttt_steps,
        config.train.step_decay,
        objective_of(config.train),
        config.train.activation_checkpointing,
    )
    return initialize_model_engine(
        module,
        deepspeed_config(
            zero_stage=config.deepspeed.zero_stage,
            bf16=context.dtype is torch.bfloat16,
            micro_batches=config.train.rows_per_step // world.size,
            world_size=world.size,
            offload_optimizer=config.deepspeed.offload_optimizer,
            offload_parameters=config.deepspeed.offload_parameters,
        ),
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        guard=StepGuard(optim.max_norm_jump, optim.max_skipped_steps, partial(sample_names, source, context)),
        muon=muon_settings(optim),
        head_apart=optim.head_start_fraction > 0,
    )


def row_loader(
    context: RunContext, source: HiddenStateSource, drafter: DrafterConfig, begin: RowPosition
) -> RowLoader:
    """Return the loader of this rank's rows, from a position in their order on."""
    config, world = context.config, context.world
    return RowLoader(
        source,
        row_tokens=config.train.row_tokens,
        rows_per_step=config.train.rows_per_step,
        rank=world.rank,
        world_size=world.size,
        seed=context.train_seed,
        costs=sample_costs(context, source, drafter),
        pin_memory=world.device.type == "cuda",
        begin=begin,
    )


def muon_settings(optim: OptimConfig) -> MuonSettings | None:
    """Return the settings of Muon; None if AdamW updates all weights."""
    if optim.name is not Optimizer.muon:
        return None
    assert optim.matrix_lr is not None  # from `with_rates`
    return MuonSettings(optim.matrix_lr, optim.momentum)


def sample_names(source: HiddenStateSource, context: RunContext, indices: Sequence[int]) -> list[str]:
    """Return the ids in the tokenized data of samples that training reads."""
    if isinstance(source, HiddenStateStore):
        indices = [source.sample_ids[index] for index in indices]
    return [str(name) for name in training_samples(context).select(indices)["id"]]


def new_drafter(context: RunContext, vocab: DraftVocab) -> tuple[Drafter, FrozenParts]:
    """Return the drafter before its first step, and its frozen tensors on this rank's device."""
    return build_drafter(
        context.drafter_config(len(vocab.d2t)),
        vocab,
        context.parts,
        context.initial,
        from_target=context.from_target,
        train_lm_head=context.config.drafter.train_lm_head,
        seed=context.train_seed,
        device=context.world.device,
        dtype=context.dtype,
    )


def sample_costs(
    context: RunContext, source: HiddenStateSource, drafter: DrafterConfig
) -> list[float] | None:
    """Return the FLOPs of each of the source's samples; None where the ranks have no choice of rows."""
    train, world = context.config.train, context.world
    if world.size == 1 or train.rows_per_step == world.size:
        return None
    supervision = torch.from_numpy(dataset_supervision(training_samples(context)))
    if isinstance(source, HiddenStateStore):
        supervision = supervision[list(source.sample_ids)]
    return sample_flops(drafter, train.ttt_steps, supervision, context.config.drafter.train_lm_head).tolist()


def expected_speed(context: RunContext, drafter: DrafterConfig, tensors: dict[str, list[int]]) -> Speed:
    """Return what logged speed and memory are compared with on this rank's device."""
    config, world = context.config, context.world
    if world.device.type != "cuda":
        return Speed()
    memory = trainer_memory(
        drafter,
        tensors,
        trainer_settings(config, world.size),
        worst_counts(config.train.row_tokens, config.train.ttt_steps),
        "cuda",
    )
    peak_flops = peak_bf16_flops(torch.cuda.get_device_name(world.device))
    return Speed(peak_flops, memory.total, memory.held)


def rollout_curriculum(train: TrainConfig, state: TrainState, max_steps: int) -> Callable[[int], int]:
    """Return a function from an optimizer step to its speculation steps.

    A training that continues another rolls all of them out.
    """
    ramp_steps = 0 if state.continued_at else math.ceil(train.ttt_curriculum_fraction * max_steps)
    return partial(rollout_steps, num_steps=train.ttt_steps, ramp_steps=ramp_steps)


def row_flops(context: RunContext, drafter: DrafterConfig) -> Callable[[PackedBatch, int], int]:
    """Return a function from a packed row and its speculation steps to the FLOPs of forward and backward."""
    train, head_trained = context.config.train, context.config.drafter.train_lm_head
    full = objective_of(train).needs_full_vocabulary
    return lambda batch, num_steps: (
        step_flops(drafter, count_step(batch, num_steps), head_trained, full).total
    )


def keep_vocab(artifact: Artifact, directory: Path, world: World) -> None:
    """Keep the draft vocabulary with the checkpoints, for trainings that continue them.

    Raises:
        UserError: the training that this one continues has another one.
    """
    ours, kept = artifact.directory / VOCAB, directory / VOCAB
    on_main_first(world.is_main, lambda: None if kept.exists() else _copy(ours, kept))
    if not torch.equal(load_file(ours)["d2t"], load_file(kept)["d2t"]):
        raise UserError(
            "train.continue_from",
            directory,
            f"The training that this one continues has another draft vocabulary than {ours}, which was made "
            "in output_dir before. Give another output_dir.",
        )


def _copy(source: Path, copy: Path) -> None:
    partial = copy.with_name(f".{copy.name}.partial")
    shutil.copyfile(source, partial)
    os.replace(partial, copy)


def prepared(state: TrainState, context: RunContext) -> TrainState:
    """Return the state with which the loop begins.

    With the data of before, the order of its rows continues. With other data, or rows of another length, a
    new epoch begins. If the held-out prompts are others, the best weights are chosen again.
    """
    order, validated_on = order_key(context.artifacts[Stage.train].inputs), validation_key(context)
    if state.order != order:
        begun = state.epoch + (1 if state.row else 0)
        state = replace(state, order=order, epoch=begun, row=0, first_epoch=begun)
    if state.validated_on != validated_on:
        state = replace(state, validated_on=validated_on, best_step=None, best_acceptance_length=0.0)
    return state


def steps_of_epochs(num_epochs: int, rows_per_step: int, rows_per_epoch: int, state: TrainState) -> int:
    """Return the step at which so many epochs of the data are complete; an earlier order's do not count."""
    left = (state.first_epoch + num_epochs - state.epoch) * rows_per_epoch - state.row
    return max(1, state.step + math.floor(left / rows_per_step))


def loop_settings(context: RunContext, state: TrainState, rows_per_epoch: int, speed: Speed) -> LoopSettings:
    """Return the loop's settings, with the recipe's epochs and fractions in steps.

    Raises:
        UserError: no step is left for a training that has just continued another.
    """
    config, optim = context.config, context.optim
    assert optim.lr is not None
    epochs, rows_per_step = config.train.num_epochs, config.train.rows_per_step
    max_steps = config.train.max_steps or steps_of_epochs(epochs, rows_per_step, rows_per_epoch, state)
    if state.step and state.step == state.continued_at and state.step >= max_steps:
        remedy = f"These epochs end with step {max_steps}, and the training to continue is at {state.step}."
        raise UserError("train.num_epochs", epochs, f"{remedy} Give more, or give train.max_steps.")
    warmup_steps = optim.warmup_steps
    if warmup_steps is None:
        warmup_steps = math.ceil(optim.warmup_fraction * max_steps)
    return LoopSettings(
        max_steps=max_steps,
        warmup_steps=warmup_steps,
        peak_lr=optim.lr,
        min_lr_fraction=optim.min_lr_fraction,
        schedule=optim.schedule.value,
        decay_start=max(max_steps - math.ceil(optim.decay_fraction * max_steps), state.continued_at),
        decay_shape=optim.decay_shape.value,
        head_start=0 if state.continued_at else math.ceil(optim.head_start_fraction * max_steps),
        num_depths=config.train.ttt_steps,
        log_every=config.train.log_every,
        validate_every=config.train.validate_every,
        save_every=config.train.save_every,
        keep_weights_every=config.train.keep_weights_every,
        draft_tokens=config.evaluate.draft_tokens,
        speed=speed,
    )


def check_rows(context: RunContext) -> None:
    """Raise UserError if the tokenized data cannot fill the rows of a step, before the target runs."""
    train = context.config.train
    lengths = dataset_lengths(training_samples(context))
    rows = pack_epoch(lengths, train.row_tokens, context.train_seed, epoch=0)
    check_enough(len(rows), train.row_tokens, train.rows_per_step)


def check_world_size(checkpoints: CheckpointDirectory, world_size: int) -> None:
    """Raise UserError if the run to resume had another number of processes."""
    saved = checkpoints.saved_world_size()
    if saved is not None and saved != world_size:
        raise UserError(
            "nproc",
            world_size,
            f"The interrupted run in {checkpoints.root} had {saved} processes, and its optimizer state is "
            f"split among them; resume with {saved}, or delete that directory to start over.",
        )


def _tracked_config(context: RunContext) -> dict[str, Any]:
    return asdict(context.config) | {"optim": asdict(context.optim)}
