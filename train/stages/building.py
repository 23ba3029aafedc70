"""Building what trains: the model engine around the drafter, the loader of its rows."""

import math
from collections.abc import Callable

import deepspeed
import torch
from datasets import Dataset

from data.batches.loader import RowLoader, RowPosition
from data.batches.shared_rows import SharedRows
from data.capture.tokens import dataset_supervision
from data.samples import HiddenStateSource, StateShape
from data.store import HiddenStateStore
from eagle31.cost.devices import peak_bf16_flops
from eagle31.cost.flops import count_step, draft_costs, sample_flops, step_flops
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch
from train.config.run import RunConfig, training_seed
from train.config.training import OptimConfig, Optimizer, Precision
from train.distributed import World
from train.plan.memory import trainer_memory, worst_counts
from train.plan.sizes import trainer_settings
from train.trainer.engine import TrainedModule, deepspeed_config, initialize_model_engine
from train.trainer.metrics import Speed
from train.trainer.process_groups import RowGroups


def step_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype of the training step."""
    return torch.bfloat16 if config.deepspeed.precision is Precision.bf16 else torch.float32


def new_engine(
    config: RunConfig,
    optim: OptimConfig,
    world: World,
    drafter: Drafter,
    frozen: FrozenParts,
    groups: RowGroups | None,
) -> deepspeed.DeepSpeedEngine:
    """Return the model engine around a drafter before its first step. Every rank calls."""
    assert optim.lr is not None  # from `with_rates`
    module = TrainedModule(
        drafter,
        frozen,
        config.train.ttt_steps,
        config.train.step_decay,
        groups and groups.on_device,
    )
    return initialize_model_engine(
        module,
        deepspeed_config(
            zero_stage=config.deepspeed.zero_stage,
            bf16=config.deepspeed.precision is Precision.bf16,
            micro_batches=math.ceil(config.train.rows_per_step * config.train.row_ranks / world.size),
            world_size=world.size,
            offload_optimizer=config.deepspeed.offload_optimizer,
        ),
        lr=optim.lr,
        matrix_lr=optim.matrix_lr if optim.name is Optimizer.muon else None,
    )


def sample_names(loader: RowLoader, step: int, samples: Dataset) -> list[str]:
    """Return the ids in the tokenized data of the samples of a step, counted from 1, on all ranks."""
    indices = loader.step_samples(step - 1)
    if isinstance(loader.source, HiddenStateStore):
        indices = loader.source.sample_ids[indices].tolist()
    return [str(name) for name in samples.select(indices)["id"]]


def row_loader(
    config: RunConfig,
    world: World,
    source: HiddenStateSource,
    samples: Dataset,
    drafter: DrafterConfig,
    begin: RowPosition,
) -> RowLoader:
    """Return the loader of this rank's rows, from a position in their order on.

    Args:
        samples: the tokenized data whose states the source has.
    """
    return RowLoader(
        source,
        row_tokens=config.train.row_tokens,
        rows_per_step=config.train.rows_per_step,
        rank=world.rank // config.train.row_ranks,
        world_size=world.size // config.train.row_ranks,
        seed=training_seed(config),
        costs=sample_costs(config, world, source, samples, drafter),
        pin_memory=world.device.type == "cuda",
        begin=begin,
        state_shape=state_shape(config, drafter),
        reader=world.rank % config.train.row_ranks,
        num_readers=config.train.row_ranks,
    )


def state_shape(config: RunConfig, drafter: DrafterConfig) -> StateShape:
    """Return the shape of the hidden states, with the dtype of the step."""
    return StateShape(len(drafter.aux_layer_ids), drafter.target_hidden_size, step_dtype(config))


def shared_rows(config: RunConfig, drafter: DrafterConfig, groups: RowGroups | None) -> SharedRows | None:
    """Return what hands rows on among the ranks that share them; None where each has its own."""
    if groups is None:
        return None
    costs = draft_costs(drafter, config.train.ttt_steps, config.drafter.train_lm_head)
    return SharedRows(groups.on_host, state_shape(config, drafter), drafter.key_reach, costs)


def sample_costs(
    config: RunConfig, world: World, source: HiddenStateSource, samples: Dataset, drafter: DrafterConfig
) -> list[float] | None:
    """Return the FLOPs of each of the source's samples; None where the ranks have no choice of rows."""
    train = config.train
    if train.rows_per_step <= world.size // train.row_ranks or world.size == train.row_ranks:
        return None
    supervision = torch.from_numpy(dataset_supervision(samples))
    if isinstance(source, HiddenStateStore):
        supervision = supervision[source.sample_ids.tolist()]
    return sample_flops(drafter, train.ttt_steps, supervision, config.drafter.train_lm_head).tolist()


def row_flops(config: RunConfig, drafter: DrafterConfig) -> Callable[[PackedBatch], int]:
    """Return a function from a packed row to the FLOPs of its forward and backward."""
    train, head_trained = config.train, config.drafter.train_lm_head

    def flops_of(batch: PackedBatch) -> int:
        counts = count_step(batch, train.ttt_steps, drafter, train.max_drafts_per_row)
        return step_flops(drafter, counts, head_trained).total

    return flops_of


def expected_speed(config: RunConfig, world: World, drafter: Drafter) -> Speed:
    """Return what logged speed and memory are compared with on this rank's device."""
    if world.device.type != "cuda":
        return Speed()
    memory = trainer_memory(
        drafter.config,
        {name: list(weight.shape) for name, weight in drafter.named_parameters()},
        trainer_settings(config, world.size),
        worst_counts(config.train),
        "cuda",
    )
    peak_flops = peak_bf16_flops(torch.cuda.get_device_name(world.device))
    return Speed(peak_flops, memory.total)
