"""The plan of a run: the drafter's shape, the amount of work, and ways to use nodes and GPUs for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from data.target.architecture import active_intermediate_size, expert_intermediate_size
from eagle31.model.config import DrafterConfig
from train.config.launcher import LauncherKind
from train.config.run import RunConfig, Stage, uses_vllm
from train.distributed import World
from train.optim.cost import OrthogonalizationWork, orthogonalization_work
from train.optim.learning_rates import described
from train.planning.at_hand import cluster_at_hand
from train.planning.commands import Command, commands
from train.planning.layout import Layout, layout, layouts
from train.planning.memory_check import Shortage, disk_check
from train.planning.placement import Cluster
from train.planning.remedies import applied, assignments
from train.planning.server_memory import Parallelism
from train.planning.sizes import RunSizes
from train.planning.target import TargetSize
from train.planning.work import WorkPlan, mean_rows_per_step, work_plan

_GPUS_PER_NODE = 8
_NODES = (1, 2, 4)  # for a target that needs several GPUs


@dataclass(frozen=True)
class Plan:
    """The content of `plan.json`."""

    recipe: str
    target_model: str
    drafter: DrafterConfig
    tensors: dict[str, list[int]]  # shapes of the trained tensors by name
    num_parameters: int
    target: TargetSize
    work: WorkPlan
    optimizer: str  # its name and its peak learning rates, in words
    orthogonalization: OrthogonalizationWork | None  # None: AdamW updates all weights
    gpu_bytes: int | None
    layout: Layout  # of this run, or the first that works
    others: list[tuple[Layout, list[Command]]]  # further ways, with their commands, for stages=[plan]
    commands: list[Command]  # of the layout, for stages=[plan]
    disk: list[Shortage]
    notes: list[str]

    @property
    def shortages(self) -> list[Shortage]:
        return [*self.layout.shortages, *self.disk]

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["layout"]["memory"]["total"] = self.layout.memory.total
        return values


def make_plan(config: RunConfig, world: World, data_summary: Mapping[str, Any]) -> Plan:
    """Return the plan from the recipe and the target's config; the drafter is built without memory.

    Args:
        data_summary: what the data stage recorded; empty before it has run.

    Raises:
        UserError: the recipe contradicts the target's config, or no drafter can be made from them.
    """
    sizes = RunSizes(config)
    work = work_plan(config, sizes.drafter, sizes.target.parameters, data_summary)
    gpu_bytes = available_gpu_bytes(config)
    found = _layouts(config, world, sizes, work, gpu_bytes)
    first = next((one for one in found if one.works), found[0])
    shows_commands = config.stages == [Stage.plan]
    rest = [one for one in found if one is not first] if shows_commands else []
    orthogonalization = None
    if first.settings.muon:
        orthogonalization = orthogonalization_work(
            sizes.tensors,
            num_ranks=first.settings.world_size,
            rows_per_step=mean_rows_per_step(applied(config, first.overrides).train),
            row_flops=work.step_flops.total,
        )
    return Plan(
        recipe=config.recipe_name,
        target_model=config.target.model,
        drafter=sizes.drafter,
        tensors=sizes.tensors,
        num_parameters=sizes.num_parameters,
        target=sizes.target,
        work=work,
        optimizer=described(config.optim, sizes.drafter),
        orthogonalization=orthogonalization,
        gpu_bytes=gpu_bytes,
        layout=first,
        others=[(one, commands(config, one) if one.works else []) for one in rest],
        commands=commands(config, first) if shows_commands and first.works else [],
        disk=disk_check(config, work) if for_this_machine(config) else [],
        notes=[*_needs(first), *notes(config, sizes.drafter, sizes.target_config)],
    )


def _needs(found: Layout) -> list[str]:
    changes = assignments(found.overrides)
    return [f"on these GPUs the run needs {changes}"] if changes and found.works else []


def _layouts(
    config: RunConfig, world: World, sizes: RunSizes, work: WorkPlan, gpu_bytes: int | None
) -> list[Layout]:
    """Return the layout of this run; where only the plan is made, or there is no GPU, ways to run it."""
    at_hand = cluster_at_hand(world)
    planned = config.plan.gpus_per_node or config.plan.gpu_memory_gb
    if at_hand.gpus_per_node == 0 and planned is None:
        return [layout(config, sizes, work, at_hand)]
    if at_hand.gpus_per_node and config.stages != [Stage.plan]:
        return [layout(config, sizes, work, at_hand)]
    in_job = config.launcher.gpus_per_node if config.launcher.kind is LauncherKind.slurm else None
    gpus = in_job or at_hand.gpus_per_node or config.plan.gpus_per_node or _GPUS_PER_NODE
    return [
        one
        for nodes in _node_counts(config, at_hand)
        for one in layouts(config, sizes, work, nodes, gpus, gpu_bytes)
    ]


def _node_counts(config: RunConfig, at_hand: Cluster) -> tuple[int, ...]:
    if config.plan.num_nodes is not None:
        return (config.plan.num_nodes,)
    if config.launcher.kind is LauncherKind.slurm:
        return (config.launcher.nodes,)
    if at_hand.num_nodes > 1:
        return (at_hand.num_nodes,)
    several = uses_vllm(config) and Parallelism.of(config.vllm.engine_args).gpus > 1
    return _NODES if several and not config.vllm.servers else (1,)


def available_gpu_bytes(config: RunConfig) -> int | None:
    """Return the memory of this machine's GPU, else the recipe's plan.gpu_memory_gb; None without either."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return None if config.plan.gpu_memory_gb is None else int(config.plan.gpu_memory_gb * 1e9)


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
    if drafter.max_position_embeddings < config.data.max_tokens:
        found.append(
            f"data.max_tokens={config.data.max_tokens} is longer than the target's longest sequences "
            f"(max_position_embeddings={drafter.max_position_embeddings})"
        )
    active, single = active_intermediate_size(target_config), expert_intermediate_size(target_config)
    if single is not None and active is not None and drafter.intermediate_size < active:
        found.append(
            f"drafter.intermediate_size={drafter.intermediate_size} is narrower than the experts that one "
            f"token passes through in the target: together they are {active} wide, each {single}"
        )
    return found
