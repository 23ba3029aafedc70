"""Sizes of the drafter, of its training and of the target's servers, from configurations alone."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers import PreTrainedConfig

from data.target.aux_layers import check_aux_layer_ids, default_aux_layer_ids
from eagle31.export.write import check_config
from eagle31.model.config import DrafterConfig
from eagle31.model.kinds import new_drafter
from train.config.run import RunConfig
from train.config.training import Optimizer, Precision
from train.drafter.shape import check_positions, complete_shape, fitted
from train.plan.memory import TrainerMemory, TrainerSettings, trainer_memory, worst_counts
from train.plan.target import (
    Parallelism,
    ServerMemory,
    TargetSize,
    planned_config,
    server_memory,
    target_size,
)
from train.tables import gigabytes

# Settings that lower the memory of training, or raise it: that depends on the drafter and the processes.
_OF_MEMORY = (
    ("deepspeed", "zero_stage", 2),
    ("train", "rollout_chunk", 4096),
    ("deepspeed", "offload_optimizer", True),
)


@dataclass(frozen=True)
class RunSizes:
    """What a run's models take, without any weight.

    Raises:
        UserError: the recipe contradicts the target's config, or no drafter can be made from them.
    """

    config: RunConfig

    @cached_property
    def target_config(self) -> PreTrainedConfig:
        return planned_config(self.config.target)

    @cached_property
    def target(self) -> TargetSize:
        return target_size(self.config.target, self.target_config)

    @cached_property
    def drafter(self) -> DrafterConfig:
        text = self.target_config.get_text_config()
        shape = fitted(self.config.drafter, text.vocab_size)
        ids = shape.aux_layer_ids
        if ids is None:
            aux_layer_ids = default_aux_layer_ids(text.num_hidden_layers)
        else:
            aux_layer_ids = check_aux_layer_ids(ids, text.num_hidden_layers)
        drafter = complete_shape(
            shape,
            self.target_config,
            aux_layer_ids,
            text.vocab_size,
            shape.draft_vocab_size or text.vocab_size,
        )
        check_config(drafter, self.config.export.layout)
        check_positions(self.config, drafter.max_position_embeddings)
        return drafter

    @cached_property
    def tensors(self) -> dict[str, list[int]]:
        """Shapes of the trained tensors by name; the drafter is built without memory."""
        with torch.device("meta"):
            drafter = new_drafter(self.drafter, with_head=self.config.drafter.train_lm_head)
        return {name: list(parameter.shape) for name, parameter in drafter.named_parameters()}

    @cached_property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.tensors.values())

    def trainer(self, num_ranks: int, device: str) -> TrainerMemory:
        """Return the memory of one of so many training processes. device is "cuda" or "cpu"."""
        settings = trainer_settings(self.config, num_ranks)
        counts = worst_counts(self.config.train)
        return trainer_memory(self.drafter, self.tensors, settings, counts, device)

    def smaller_training(self, num_ranks: int) -> str:
        """Return the settings with which training takes less memory of a GPU, in words."""
        found, now = [], self.trainer(num_ranks, "cuda").total
        for group, name, value in _OF_MEMORY:
            changed = replace(getattr(self.config, group), **{name: value})
            settings = replace(self.config, **{group: changed})
            total = replace(self, config=settings).trainer(num_ranks, "cuda").total
            refused = settings.deepspeed.offload_optimizer and settings.deepspeed.zero_stage == 0
            if total < now and not refused:
                found.append(f"{group}.{name}={str(value).lower()} ({gigabytes(total)})")
        return ", ".join([*found, "or shorter rows (train.row_tokens, data.max_tokens)"])

    def server(self, parallel: Parallelism) -> ServerMemory:
        """Return the memory of one GPU of a server."""
        return server_memory(self.config, self.target_config, self.target, parallel)


def trainer_settings(config: RunConfig, num_ranks: int) -> TrainerSettings:
    """Return the settings that the memory of training depends on."""
    return TrainerSettings(
        zero_stage=config.deepspeed.zero_stage,
        bf16=config.deepspeed.precision is Precision.bf16,
        offload_optimizer=config.deepspeed.offload_optimizer,
        train_lm_head=config.drafter.train_lm_head,
        rollout_chunk=config.train.rollout_chunk,
        draft_tokens=config.evaluate.draft_tokens,
        row_tokens=config.train.row_tokens,
        rows_per_step=config.train.rows_per_step,
        world_size=num_ranks,
        muon=config.optim.name is Optimizer.muon,
    )
