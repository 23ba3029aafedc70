"""The plan of a run: the drafter's shape, memory, the amount of work, and what does not fit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from data.target.architecture import active_intermediate_size, expert_intermediate_size
from data.target.aux_layers import check_aux_layer_ids, default_aux_layer_ids
from eagle31.export.layouts import check_layout
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from train.config.run import RunConfig
from train.config.training import Precision
from train.distributed import World
from train.drafter.shape import complete_shape
from train.planning.memory import TrainerMemory, TrainerSettings, trainer_memory, worst_counts
from train.planning.memory_check import Shortage, memory_check
from train.planning.target import TargetPlan, planned_config, target_plan
from train.planning.work import WorkPlan, work_plan


@dataclass(frozen=True)
class Plan:
    """The content of `plan.json`."""

    recipe: str
    target_model: str
    drafter: DrafterConfig
    tensors: dict[str, list[int]]  # shapes of the trained tensors by name
    num_parameters: int
    settings: TrainerSettings
    memory: TrainerMemory
    target: TargetPlan
    work: WorkPlan
    gpu_bytes: int | None
    shortages: list[Shortage]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["memory"]["total"] = self.memory.total
        values["target"] |= {
            "bytes_per_gpu": self.target.bytes_per_gpu,
            "num_replicas": self.target.num_replicas,
        }
        return values


def make_plan(config: RunConfig, world: World, data_summary: Mapping[str, Any]) -> Plan:
    """Return the plan from the recipe and the target's config; the drafter is built without memory.

    Args:
        data_summary: what the data stage recorded; empty before it has run.

    Raises:
        UserError: the recipe contradicts the target's config, or no drafter can be made from them.
    """
    target_config = planned_config(config.target)
    text = target_config.get_text_config()
    ids = config.drafter.aux_layer_ids
    if ids is None:
        aux_layer_ids = default_aux_layer_ids(text.num_hidden_layers)
    else:
        aux_layer_ids = check_aux_layer_ids(ids, text.num_hidden_layers)
    drafter = complete_shape(
        config.drafter,
        target_config,
        aux_layer_ids,
        text.vocab_size,
        config.drafter.draft_vocab_size or text.vocab_size,
    )
    check_layout(drafter, config.export.layout)
    with torch.device("meta"):
        parameters = dict(Drafter(drafter, with_head=config.drafter.train_lm_head).named_parameters())
    num_parameters = sum(parameter.numel() for parameter in parameters.values())
    num_gpus = config.plan.num_gpus or world.size
    settings = trainer_settings(config, num_gpus)
    gpu_bytes = available_gpu_bytes(config)
    device = "cuda" if gpu_bytes is not None else world.device.type

    def memory_of(settings: TrainerSettings) -> TrainerMemory:
        counts = worst_counts(settings.row_tokens, config.train.ttt_steps)
        return trainer_memory(drafter, num_parameters, settings, counts, device)

    target = target_plan(config, target_config, num_gpus)
    work = work_plan(config, drafter, target, num_gpus, data_summary)
    return Plan(
        recipe=config.recipe_name,
        target_model=config.target.model,
        drafter=drafter,
        tensors={name: list(parameter.shape) for name, parameter in parameters.items()},
        num_parameters=num_parameters,
        settings=settings,
        memory=memory_of(settings),
        target=target,
        work=work,
        gpu_bytes=gpu_bytes,
        shortages=memory_check(
            config, settings, memory_of, target, work, gpu_bytes, for_this_machine(config)
        ),
        notes=notes(config, drafter, target_config),
    )


def trainer_settings(config: RunConfig, num_gpus: int) -> TrainerSettings:
    return TrainerSettings(
        zero_stage=config.deepspeed.zero_stage,
        bf16=config.deepspeed.precision is Precision.bf16,
        offload_optimizer=config.deepspeed.offload_optimizer,
        offload_parameters=config.deepspeed.offload_parameters,
        train_lm_head=config.drafter.train_lm_head,
        activation_checkpointing=config.train.activation_checkpointing,
        row_tokens=config.train.row_tokens,
        rows_per_step=config.train.rows_per_step,
        world_size=num_gpus,
    )


def available_gpu_bytes(config: RunConfig) -> int | None:
    """Return the recipe's plan.gpu_memory_gb, else the memory of this machine's GPU; None without either."""
    if config.plan.gpu_memory_gb is not None:
        return int(config.plan.gpu_memory_gb * 1e9)
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def for_this_machine(config: RunConfig) -> bool:
    """Whether the run is for this machine, and not for GPUs that only the recipe describes."""
    return config.plan.gpu_memory_gb is None or torch.cuda.is_available()


def notes(config: RunConfig, drafter: DrafterConfig, target_config: Any) -> list[str]:
    """Return what the plan leaves out, and what looks like a mistake."""
    found = []
    if config.drafter.init_from is not None:
        found.append(
            "drafter.init_from is not read for the plan; its checkpoint may change the drafter's shape"
        )
    if not for_this_machine(config):
        found.append("this machine has no GPU: disk space and the spool's memory are not checked")
    active, single = active_intermediate_size(target_config), expert_intermediate_size(target_config)
    if single is not None and active is not None and drafter.intermediate_size < active:
        found.append(
            f"drafter.intermediate_size={drafter.intermediate_size} is narrower than the experts that one "
            f"token passes through in the target: together they are {active} wide, each {single}"
        )
    return found
