"""The ways to use nodes and GPUs for a run: placement, memory on each GPU, hours."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from train.config.run import RunConfig, uses_vllm
from train.config.vllm import Placement
from train.planning.memory import TrainerMemory, TrainerSettings
from train.planning.memory_check import Shortage, memory_check
from train.planning.placement import (
    CannotPlace,
    Cluster,
    ServerPlacement,
    place_servers,
    serves_training,
    with_placement,
)
from train.planning.remedies import Change, applied, smaller_training
from train.planning.server_memory import Parallelism, ServerMemory
from train.planning.sizes import RunSizes, trainer_settings
from train.planning.target_gpus import TargetOnGpus, target_elsewhere, target_in_vllm
from train.planning.work import Gpus, Hours, WorkPlan, hours


@dataclass(frozen=True)
class Layout:
    """One way to run on these nodes and GPUs, and what it takes; or why it cannot work."""

    cluster: Cluster
    kind: Placement | None  # None: nothing uses vLLM
    overrides: Change  # what the run needs in addition to its configuration
    settings: TrainerSettings
    memory: TrainerMemory
    placement: ServerPlacement | None
    server: ServerMemory | None  # on each GPU of a server, without its cache
    target: TargetOnGpus | None  # None where it cannot work
    hours: Hours | None
    refusal: str | None  # why the servers cannot be placed, and a change with which they can
    shortages: list[Shortage]

    @property
    def works(self) -> bool:
        return self.refusal is None and not self.shortages

    @property
    def num_nodes(self) -> int:
        return self.cluster.num_nodes + self.cluster.capture_nodes


def layouts(
    config: RunConfig,
    sizes: RunSizes,
    work: WorkPlan,
    num_nodes: int,
    gpus_per_node: int,
    gpu_bytes: int | None,
) -> list[Layout]:
    """Return the ways to run on these nodes, the one to prefer first.

    On one node the target shares the GPUs or is split from training. On several it shares each node's or is
    apart; the number of nodes apart is the one that takes the least time. Apart comes first where the target
    runs while the drafter trains.
    """
    every = Cluster(num_nodes, gpus_per_node, max(1, gpus_per_node), gpu_bytes)
    if not uses_vllm(config) or config.vllm.servers:
        return [adjusted(config, sizes, work, every)]
    wanted = config.vllm.placement
    found = []
    if num_nodes > 1 and wanted in (Placement.auto, Placement.apart):
        found.append(_balanced(config, sizes, work, every))
        if config.launcher.capture_nodes:
            return found
    if wanted in (Placement.auto, Placement.shared):
        found.append(adjusted(with_placement(config, Placement.shared), sizes, work, every))
    if wanted is Placement.split or (wanted is Placement.auto and num_nodes == 1 and gpus_per_node > 1):
        apart = [_split(config, sizes, work, every, one) for one in _server_sizes(config, gpus_per_node)]
        found.append(_quickest(apart, work))
    if not found:  # apart, on one node
        found.append(adjusted(config, sizes, work, every))
    idle = not serves_training(config)  # servers that are apart wait while the drafter trains
    return sorted(found, key=lambda one: (not one.works, idle and one.kind is Placement.apart))


def adjusted(config: RunConfig, sizes: RunSizes, work: WorkPlan, cluster: Cluster) -> Layout:
    """Return one way to run, with overrides where the rows or training's memory would not work."""
    size, train = cluster.num_ranks, config.train
    rows = {
        "train.rows_per_step": train.rows_per_step,
        "train.rows_per_step_start": train.rows_per_step_start,
    }
    change: Change = {
        key: math.ceil(value / size) * size
        for key, value in rows.items()
        if value is not None and value % size
    }
    attempts = [change, *(change | smaller for smaller in smaller_training(config))]
    first = None
    for attempt in attempts:
        found = replace(layout(applied(config, attempt), sizes, work, cluster), overrides=attempt)
        if found.works:
            return found
        first = first or found
    assert first is not None
    return first


def layout(config: RunConfig, sizes: RunSizes, work: WorkPlan, cluster: Cluster) -> Layout:
    """Return how this configuration runs on these GPUs."""
    settings = trainer_settings(config, cluster.num_ranks)
    device = "cuda" if cluster.gpu_bytes is not None else "cpu"
    memory = sizes.trainer(settings, device)
    in_vllm = uses_vllm(config)
    plain = Layout(
        cluster=cluster,
        kind=_kind(config, cluster) if in_vllm else None,
        overrides={},
        settings=settings,
        memory=memory,
        placement=None,
        server=None,
        target=None,
        hours=None,
        refusal=None,
        shortages=[],
    )
    if in_vllm:
        try:
            placement = place_servers(config, cluster, sizes.on_gpus(cluster.num_ranks))
        except CannotPlace as error:
            return replace(plain, refusal=error.remedy)
        arguments = {**config.vllm.engine_args, **placement.engine_args}
        server = sizes.server(config, Parallelism.of(arguments))
        target = target_in_vllm(config, cluster, placement, server)
        plain = replace(plain, kind=placement.kind, placement=placement, server=server)
    else:
        target = target_elsewhere(config, cluster, sizes.target)
    shortages = []
    if cluster.gpu_bytes is not None:
        shortages = memory_check(
            config, settings, lambda other: sizes.trainer(other, device), target, cluster.gpu_bytes
        )
    at_once = serves_training(config) and plain.kind is not Placement.shared
    gpus = Gpus(cluster.num_ranks, max(1, target.num_gpus), at_once)
    return replace(plain, target=target, shortages=shortages, hours=hours(config, work, gpus))


def _kind(config: RunConfig, cluster: Cluster) -> Placement:
    apart = config.vllm.servers or cluster.capture_nodes
    return Placement.apart if apart else config.vllm.placement


def _balanced(config: RunConfig, sizes: RunSizes, work: WorkPlan, every: Cluster) -> Layout:
    clusters = [
        replace(every, num_nodes=every.num_nodes - nodes, capture_nodes=nodes)
        for nodes in range(1, every.num_nodes)
    ]
    fixed = config.launcher.capture_nodes
    chosen = [one for one in clusters if one.capture_nodes == fixed] or clusters
    changed = with_placement(config, Placement.auto)
    return _quickest([adjusted(changed, sizes, work, one) for one in chosen], work)


def _split(config: RunConfig, sizes: RunSizes, work: WorkPlan, every: Cluster, gpus: int) -> Layout:
    cluster = replace(every, processes_per_node=every.gpus_per_node - gpus)
    return adjusted(with_placement(config, Placement.split), sizes, work, cluster)


def _server_sizes(config: RunConfig, gpus_per_node: int) -> Iterator[int]:
    """Yield the numbers of GPUs that a node may give to its server."""
    parallel = Parallelism.of(config.vllm.engine_args)
    sizes = range(parallel.gpus, gpus_per_node, parallel.gpus)
    # A server that is too large is refused by the placement.
    yield from sizes[:1] if parallel.given and sizes else sizes or [gpus_per_node - 1]


def _quickest(found: list[Layout], work: WorkPlan) -> Layout:
    """Return the one that works and takes the least time, by the FLOPs of each GPU."""

    def time(one: Layout) -> float:
        if one.target is None:
            return math.inf
        regenerate = work.regeneration.flops if work.regeneration else 0
        capture, train = work.capture_flops or 1, work.train_flops or 1
        trained = train / one.cluster.num_ranks
        return regenerate / one.target.num_gpus + max(capture / one.target.num_gpus, trained)

    return min(found, key=lambda one: (not one.works, time(one)))
