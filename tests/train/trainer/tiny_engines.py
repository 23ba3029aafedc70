"""What the workers train: a tiny drafter's model engine at any ZeRO stage, on random samples."""

from collections.abc import Mapping
from typing import Any

import torch

from tests.data.batches.memory_source import MemorySource, random_sample
from tests.eagle31.tiny import tiny_config, tiny_drafter
from train.distributed import World
from train.trainer.engine import TrainedModule, deepspeed_config, initialize_model_engine
from train.trainer.process_groups import RowGroups

ROWS_PER_STEP, ROW_TOKENS = 4, 48
LR, MATRIX_LR, MAX_NORM = 1e-2, 3e-2, 0.5


def random_source() -> MemorySource:
    """Return samples of different lengths and different numbers of supervised positions."""
    samples = []
    for seed in range(40):
        sample = random_sample(16 + seed % 31, seed, torch.float32)
        sample.loss_mask[5 : 8 + seed % 7] = True
        samples.append(sample)
    return MemorySource(samples)


def new_engine(
    zero_stage: int,
    bf16: bool,
    world: World,
    matrix_lr: float | None = None,
    *,
    offload: bool = False,
    groups: RowGroups | None = None,
    changes: Mapping[str, Any] = {},
) -> Any:
    drafter, frozen = tiny_drafter(tiny_config(**changes), torch.bfloat16 if bf16 else torch.float32)
    row_group = None if groups is None else groups.on_device
    module = TrainedModule(drafter.float(), frozen, num_steps=3, step_decay=0.8, row_group=row_group)
    config = deepspeed_config(
        zero_stage=zero_stage,
        bf16=bf16,
        micro_batches=ROWS_PER_STEP if groups else -(-ROWS_PER_STEP // world.size),
        world_size=world.size,
        offload_optimizer=offload,
    )
    # By default DeepSpeed partitions no parameter that is as small as those here.
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return initialize_model_engine(
        module,
        config,
        lr=LR,
        matrix_lr=matrix_lr,
    )
