"""Building what trains: the drafter, the model engine around it, the loader of its rows."""

import math
from collections.abc import Callable, Mapping, Sequence

import deepspeed
import torch
from torch import Tensor

from data.batches.loader import RowLoader, RowPosition
from data.capture.tokens import dataset_supervision
from data.samples import CapturedSample, HiddenStateSource, StateShape
from data.store import HiddenStateStore
from eagle31.cost.devices import peak_bf16_flops
from eagle31.cost.flops import count_step, sample_flops, step_flops
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.vocab import DraftVocab
from eagle31.training.batch import PackedBatch
from eagle31.training.drift import MIN_STEPS
from train.config.training import Optimizer
from train.context import RunContext
from train.drafter.build import build_drafter
from train.plan.memory import trainer_memory, worst_counts
from train.plan.sizes import trainer_settings
from train.stages.training.states import training_samples
from train.trainer.engine import TrainedModule, deepspeed_config, initialize_model_engine
from train.trainer.metrics import Speed
from train.trainer.validation import DriftDiagnosis


def new_drafter(
    context: RunContext, vocab: DraftVocab, projected: Mapping[str, Tensor]
) -> tuple[Drafter, FrozenParts]:
    """Return the drafter before its first step, and its frozen tensors on this rank's device."""
    return build_drafter(
        context.drafter.config(len(vocab.d2t)),
        vocab,
        context.target.parts,
        context.drafter.initial,
        projected,
        train_lm_head=context.config.drafter.train_lm_head,
        seed=context.train_seed,
        device=context.world.device,
        dtype=context.dtype,
    )


def new_engine(context: RunContext, drafter: Drafter, frozen: FrozenParts) -> deepspeed.DeepSpeedEngine:
    """Return the model engine around a drafter before its first step. Every rank calls."""
    config, optim, world = context.config, context.optim, context.world
    assert optim.lr is not None  # from `with_rates`
    module = TrainedModule(
        drafter,
        frozen,
        config.train.ttt_steps,
        config.train.step_decay,
        config.train.loss,
        config.train.activation_checkpointing,
    )
    return initialize_model_engine(
        module,
        deepspeed_config(
            zero_stage=config.deepspeed.zero_stage,
            bf16=context.dtype is torch.bfloat16,
            micro_batches=math.ceil(config.train.rows_per_step / world.size),
            world_size=world.size,
            offload_optimizer=config.deepspeed.offload_optimizer,
        ),
        lr=optim.lr,
        max_grad_norm=optim.max_grad_norm,
        matrix_lr=optim.matrix_lr if optim.name is Optimizer.muon else None,
    )


def sample_names(loader: RowLoader, step: int, context: RunContext) -> list[str]:
    """Return the ids in the tokenized data of the samples of a step, counted from 1, on all ranks."""
    indices = loader.step_samples(step - 1)
    if isinstance(loader.source, HiddenStateStore):
        indices = loader.source.sample_ids[indices].tolist()
    return [str(name) for name in training_samples(context).select(indices)["id"]]


def row_loader(
    context: RunContext,
    source: HiddenStateSource,
    drafter: DrafterConfig,
    begin: RowPosition,
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
        state_shape=StateShape(len(context.drafter.aux_layer_ids), drafter.target_hidden_size, context.dtype),
    )


def sample_costs(
    context: RunContext, source: HiddenStateSource, drafter: DrafterConfig
) -> list[float] | None:
    """Return the FLOPs of each of the source's samples; None where the ranks have no choice of rows."""
    train, world = context.config.train, context.world
    if world.size == 1 or train.rows_per_step <= world.size:
        return None
    supervision = torch.from_numpy(dataset_supervision(training_samples(context)))
    if isinstance(source, HiddenStateStore):
        supervision = supervision[source.sample_ids.tolist()]
    return sample_flops(drafter, train.ttt_steps, supervision, context.config.drafter.train_lm_head).tolist()


def row_flops(context: RunContext, drafter: DrafterConfig) -> Callable[[PackedBatch], int]:
    """Return a function from a packed row to the FLOPs of its forward and backward."""
    train, head_trained = context.config.train, context.config.drafter.train_lm_head
    full = train.loss.needs_full_vocabulary
    return lambda batch: (
        step_flops(drafter, count_step(batch, train.ttt_steps, drafter), head_trained, full).total
    )


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


def drift_diagnosis(context: RunContext, samples: Sequence[CapturedSample]) -> DriftDiagnosis:
    """Return what measures drift on held-out samples. Every rank calls."""
    config = context.config
    return DriftDiagnosis(
        samples,
        config.train.row_tokens,
        max(MIN_STEPS, config.train.ttt_steps, config.evaluate.draft_tokens),
        context.world,
        on_every_rank=config.deepspeed.zero_stage == 3,
    )
