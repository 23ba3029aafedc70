"""The plan of a run: the drafter's shape, the work, what it takes, and the commands that start it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data.batches.loader import check_divisible
from data.target.architecture import first_layer
from data.target.served import architecture, unserved
from eagle31.errors import UserError
from train.config.run import RunConfig, Stage
from train.distributed import World
from train.drafter.shape import rope_kind
from train.plan.cluster import Cluster, cluster_at_hand, planned_clusters
from train.plan.commands import Command, commands
from train.plan.disk import disks, host_memory
from train.plan.memory import TOLERANCE, USABLE_FRACTION, TrainerMemory
from train.plan.placement import TARGET_FRACTION, TargetPlacement, place_target
from train.plan.sizes import RunSizes
from train.plan.work import Hours, Work, data_summary, run_hours, run_work
from train.tables import gigabytes


@dataclass(frozen=True)
class Shortage:
    """A part of the run that needs more memory of a GPU than there is."""

    field: str
    value: Any
    what: str
    needed_bytes: int
    available_bytes: int
    remedy: str
    stages: tuple[Stage, ...]  # that need it

    def __str__(self) -> str:
        needed, available = gigabytes(self.needed_bytes), gigabytes(self.available_bytes)
        return f"{self.what} needs {needed} of each GPU, {available} are available. {self.remedy}"


@dataclass(frozen=True)
class Way:
    """One way to run on given nodes, and what it takes; or why it cannot work."""

    cluster: Cluster
    memory: TrainerMemory  # of a training process
    target: TargetPlacement | None  # that captures; None: it cannot be placed
    servers: TargetPlacement | None  # of vLLM: the target's, or those that only write; None: there is none
    hours: Hours | None
    refusal: str | None  # why the run cannot start so
    shortages: list[Shortage]
    commands: list[Command]

    @property
    def works(self) -> bool:
        return self.refusal is None and not self.shortages


@dataclass(frozen=True)
class Plan:
    """What a run takes."""

    sizes: RunSizes
    work: Work
    ways: list[Way]  # of this run; for stages=[plan], with one node and with several
    lacking: list[str]  # what has no room on this machine's disks or in its memory
    notes: list[str]
    unserved: str | None  # the engine that the export is for, if it does not serve the target

    @property
    def first(self) -> Way:
        """The way to run that the plan describes: the first that works."""
        return next((way for way in self.ways if way.works), self.ways[0])


def make_plan(config: RunConfig, world: World, given: Sequence[str] = ()) -> Plan:
    """Return the plan from the recipe and the target's config; the drafter is built without memory.

    A run is planned for the GPUs that it was started on. With stages=[plan], what `plan` says of the nodes
    comes before the GPUs at hand.

    Args:
        given: the arguments of the command, which start the run that is planned.

    Raises:
        UserError: the recipe contradicts the target's config, or no drafter can be made from them.
    """
    sizes = RunSizes(config)
    work = run_work(sizes, data_summary(config))
    if config.stages == [Stage.plan]:
        ways = [run_way(sizes, work, one, given) for one in planned_clusters(config, world)]
    else:
        ways = [run_way(sizes, work, cluster_at_hand(world))]
    here = config.plan.gpu_memory_gb is None or config.stages != [Stage.plan] or torch.cuda.is_available()
    return Plan(
        sizes=sizes,
        work=work,
        ways=ways,
        lacking=_lacking(sizes, work, ways) if here else [],
        notes=list(_notes(sizes, here)),
        unserved=unserved(architecture(sizes.target_config), config.export.layout),
    )


def _lacking(sizes: RunSizes, work: Work, ways: Sequence[Way]) -> list[str]:
    """Return what has no room on this machine, with remedies."""
    way = next((way for way in ways if way.works), ways[0])
    found = [*disks(sizes, work), host_memory(sizes, way.cluster)]
    return [f"{one}. {one.remedy}" for one in found if one.remedy]


def run_way(sizes: RunSizes, work: Work, cluster: Cluster, given: Sequence[str] | None = None) -> Way:
    """Return what the run takes on these nodes, with its commands if the user's arguments are given."""
    config = sizes.config
    memory = sizes.trainer(cluster.num_ranks, "cuda" if cluster.gpus_per_node else "cpu")
    target = writers = servers = hours = refusal = None
    try:
        target, writers = place_target(sizes, cluster), place_target(sizes, cluster, writing=True)
        servers = next((one for one in (target, writers) if one.server is not None), None)
        hours = run_hours(config, work, cluster, target, writers)
        check_divisible(config.train.rows_per_step, cluster.num_ranks, config.train.row_ranks)
    except UserError as error:
        refusal = str(error)
    shortages = list(_shortages(sizes, cluster, memory, target, writers))
    typed = []
    if given is not None and target is not None and refusal is None and not shortages:
        typed = commands(given, config, cluster, target)
    return Way(cluster, memory, target, servers, hours, refusal, shortages, typed)


def check_gpu_memory(config: RunConfig, cluster: Cluster, stages: Collection[Stage]) -> None:
    """Refuse stages that cannot have enough memory on each GPU, even if the estimate is too high.

    Raises:
        UserError: the first that cannot, with the numbers.
    """
    if cluster.gpu_bytes is None:
        return
    sizes = RunSizes(config)
    for shortage in run_way(sizes, run_work(sizes, {}), cluster).shortages:
        least = shortage.needed_bytes * (1 - TOLERANCE if Stage.train in shortage.stages else 1)
        if not set(shortage.stages).isdisjoint(stages) and least > cluster.gpu_bytes:
            raise UserError(shortage.field, shortage.value, f"By the plan's estimate, {shortage}")


def _shortages(
    sizes: RunSizes,
    cluster: Cluster,
    memory: TrainerMemory,
    target: TargetPlacement | None,
    writers: TargetPlacement | None,
) -> Iterator[Shortage]:
    """Yield what does not fit a GPU. Servers of vLLM have been checked where they were placed."""
    if cluster.gpu_bytes is None:
        return
    available = int(cluster.gpu_bytes * USABLE_FRACTION) - (target.held_bytes if target else 0)
    if memory.total > available:
        remedy = f"It needs less with {sizes.smaller_training(cluster.num_ranks)}."
        value = sizes.config.train.row_tokens
        stages = (Stage.train,)
        yield Shortage("train.row_tokens", value, "training", memory.total, available, remedy, stages)
    available, model = int(cluster.gpu_bytes * TARGET_FRACTION), sizes.config.target.model
    written = (Stage.data,) if sizes.config.data.regenerate.enabled else ()
    for placed, stages in ((target, (Stage.capture,)), (writers, (*written, Stage.answers, Stage.evaluate))):
        if placed is not None and placed.remedy and placed.bytes_per_gpu > available:
            needed, remedy = placed.bytes_per_gpu, placed.remedy
            yield Shortage("target.model", model, "the target", needed, available, remedy, stages)
            return


def _notes(sizes: RunSizes, here: bool) -> Iterator[str]:
    """Yield what the plan leaves out, and what looks like a mistake."""
    config, drafter = sizes.config, sizes.drafter
    if config.drafter.init_from is not None:
        yield "drafter.init_from is not read for the plan; its checkpoint may change the drafter's shape"
    if config.data.template_kwargs:
        given_kwargs = ", ".join(f"{name}={value}" for name, value in config.data.template_kwargs.items())
        yield f"the chat template has {given_kwargs} (data.template_kwargs); serving must have the same"
    given = config.drafter.draft_vocab_size
    if given is not None and given >= drafter.vocab_size and config.drafter.init_from is None:
        yield (
            f"drafter.draft_vocab_size={given} is not less than the target's vocabulary of "
            f"{drafter.vocab_size}, so that the drafter has all of it"
        )
    if not here:
        yield "planned for other machines: the space on this one's disks is not looked at"
    kind = rope_kind(first_layer(sizes.target_config), drafter.sliding_window)
    if kind is not None and not config.drafter.rope_parameters:
        yield f"RoPE as in the target's layers of {kind}: {drafter.served_rope} (drafter.rope_parameters)"
