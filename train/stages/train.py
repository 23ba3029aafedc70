"""The train stage: builds the drafter, the model engine and the loader, and runs the loop on every rank."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.batches.device_rows import DeviceRows
from data.batches.loader import RowLoader, check_enough
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
from eagle31.training.objectives import Objective
from train.config.run import Stage
from train.config.training import OptimConfig, Optimizer
from train.context import RunContext
from train.distributed import wait_for_ranks
from train.drafter.build import build_drafter
from train.planning.memory import trainer_memory, worst_counts
from train.planning.sizes import trainer_settings
from train.stages.capture import open_store, opened_source, training_samples
from train.stages.vocab import load_vocab
from train.trainer.checkpoints import CheckpointDirectory
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
    for name in ("log_every", "save_every", "keep_checkpoints"):
        training.pop(name)
    optim = asdict(config.optim)
    optim.pop("max_skipped_steps")
    deepspeed = asdict(config.deepspeed)
    deepspeed.pop("timeout_minutes")
    vocab = context.artifacts[Stage.vocab]
    drafter = asdict(config.drafter)
    drafter.pop("init_revision")
    if drafter.pop("init_from") is not None:
        drafter["init_from"] = context.initial_fingerprint
    return {
        "capture": context.artifacts[Stage.capture].key,
        "max_samples": config.capture.max_samples,
        "vocab": vocab.key,
        "drafter": _plain(drafter),
        "optim": _plain(optim),
        "deepspeed": _plain(deepspeed),
        "train": _plain(training),
        "draft_tokens": config.evaluate.draft_tokens,
        "seed": config.seed,
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, "value", value) for key, value in values.items()}


def run_train(context: RunContext, directory: Path) -> dict[str, Any]:
    """Train, into `checkpoints/` (the newest states, and `best/`) and `metrics.jsonl`."""
    held_out = open_store(context, "validation")
    with opened_source(context) as source:
        wait_for_ranks(_OPENED, context.world)
        return train_on(source, held_out, context, directory)


def train_on(
    source: HiddenStateSource, held_out: HiddenStateStore, context: RunContext, directory: Path
) -> dict[str, Any]:
    """Build what training needs, and train."""
    config, world = context.config, context.world
    ensure_process_group(config.deepspeed.timeout_minutes)
    use_compiled("inductor" if config.train.compile else None)
    vocab = load_vocab(context.artifacts[Stage.vocab])
    drafter, frozen = new_drafter(context, vocab)
    tensors = {name: list(weight.shape) for name, weight in drafter.named_parameters()}
    module = TrainedModule(
        drafter,
        frozen,
        config.train.ttt_steps,
        config.train.step_decay,
        Objective(config.train.loss, config.train.lk_eta, config.train.count_outside_vocab),
        config.train.activation_checkpointing,
    )
    loader = RowLoader(
        source,
        row_tokens=config.train.row_tokens,
        rows_per_step=config.train.rows_per_step,
        rank=world.rank,
        world_size=world.size,
        seed=config.seed,
        costs=sample_costs(context, source, drafter.config),
        pin_memory=world.device.type == "cuda",
    )
    speed = expected_speed(context, drafter.config, tensors)
    settings = loop_settings(context, loader.steps_per_epoch, speed)
    engine = initialize_model_engine(
        module,
        deepspeed_config(
            zero_stage=config.deepspeed.zero_stage,
            bf16=context.dtype is torch.bfloat16,
            micro_batches=config.train.rows_per_step // world.size,
            world_size=world.size,
            offload_optimizer=config.deepspeed.offload_optimizer,
            offload_parameters=config.deepspeed.offload_parameters,
        ),
        lr=config.optim.lr,
        betas=(config.optim.betas[0], config.optim.betas[1]),
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.max_grad_norm,
        guard=StepGuard(
            config.optim.max_norm_jump, config.optim.max_skipped_steps, partial(sample_names, source, context)
        ),
        muon=muon_settings(config.optim),
    )
    checkpoints = CheckpointDirectory(directory / "checkpoints", config.train.keep_checkpoints, world)
    check_world_size(checkpoints, world.size)
    state = checkpoints.resume(engine)
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
        num_steps=config.train.ttt_steps,
        device=world.device,
        dtype=context.dtype,
        stop_step=settings.max_steps,
        flops_of=row_flops(context, drafter.config) if speed.peak_flops is not None else None,
    )
    try:
        state = train(
            engine, loader, rows, validation, checkpoints, tracker, settings, state, world, context.dtype
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
        "drafter_parameters": sum(map(math.prod, tensors.values())),
        "world_size": dist.get_world_size(),
    }


def muon_settings(optim: OptimConfig) -> MuonSettings | None:
    """Return the settings of Muon; None if AdamW updates all weights."""
    return MuonSettings(optim.matrix_lr, optim.momentum) if optim.name is Optimizer.muon else None


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
        train_lm_head=context.config.drafter.train_lm_head,
        seed=context.config.seed,
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


def row_flops(context: RunContext, drafter: DrafterConfig) -> Callable[[PackedBatch], int]:
    """Return a function from a packed row to the FLOPs of its forward and backward pass."""
    num_steps, head_trained = context.config.train.ttt_steps, context.config.drafter.train_lm_head
    return lambda batch: step_flops(drafter, count_step(batch, num_steps), head_trained).total


def loop_settings(context: RunContext, steps_per_epoch: float, speed: Speed) -> LoopSettings:
    """Return the loop's settings, with the recipe's epochs and fractions in steps."""
    config = context.config
    max_steps = config.train.max_steps or max(1, math.floor(steps_per_epoch * config.train.num_epochs))
    return LoopSettings(
        max_steps=max_steps,
        warmup_steps=math.ceil(config.optim.warmup_fraction * max_steps),
        peak_lr=config.optim.lr,
        min_lr_fraction=config.optim.min_lr_fraction,
        schedule=config.optim.schedule.value,
        num_depths=config.train.ttt_steps,
        log_every=config.train.log_every,
        validate_every=config.train.validate_every,
        save_every=config.train.save_every,
        draft_tokens=config.evaluate.draft_tokens,
        speed=speed,
    )


def check_rows(context: RunContext) -> None:
    """Raise UserError if the tokenized data cannot fill the rows of a step, before the target runs."""
    train = context.config.train
    lengths = dataset_lengths(training_samples(context))
    rows = pack_epoch(lengths, train.row_tokens, context.config.seed, epoch=0)
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
    return asdict(context.config)
