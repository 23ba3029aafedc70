"""The nodes of a run, and how the plan divides them between training and the target."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from train.config.capture import CaptureMode, CaptureSource
from train.config.run import RunConfig
from train.distributed import World

_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Cluster:
    """The nodes of a run, the GPUs that each shows, and the training processes on each."""

    num_nodes: int  # nodes that train
    gpus_per_node: int  # 0 on a CPU
    processes_per_node: int
    gpu_bytes: int | None  # memory of one GPU; None: unknown, and not checked
    target_nodes: int = 0  # nodes on which scripts/submit starts servers

    @property
    def all_nodes(self) -> int:
        return self.num_nodes + self.target_nodes

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.processes_per_node


def cluster_at_hand(world: World) -> Cluster:
    """Return the cluster that this run was started on, from torchrun's environment and this node's GPUs."""
    gpus = torch.cuda.device_count()
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory if gpus else None
    return Cluster(world.num_nodes, gpus, world.ranks_per_node, gpu_bytes)


def planned_clusters(config: RunConfig, world: World) -> Iterator[Cluster]:
    """Yield the nodes to plan for: as described by `plan`, else those at hand."""
    plan, here = config.plan, cluster_at_hand(world)
    gpu_bytes = here.gpu_bytes if plan.gpu_memory_gb is None else int(plan.gpu_memory_gb * 1e9)
    if not (here.gpus_per_node or plan.gpus_per_node or plan.gpu_memory_gb):
        yield here
        return
    gpus = plan.gpus_per_node or here.gpus_per_node or _GPUS_PER_NODE
    source = config.capture.source
    on_one = source is CaptureSource.hf or (source is CaptureSource.vllm and config.vllm.servers)
    for nodes in [plan.num_nodes] if plan.num_nodes is not None else [1] if on_one else [1, 2]:
        yield _divided(config, nodes, gpus, gpu_bytes)


def _divided(config: RunConfig, num_nodes: int, gpus: int, gpu_bytes: int | None) -> Cluster:
    """Return how nodes with so many GPUs are divided."""
    source, torchspec, train = config.capture.source, config.torchspec, config.train
    processes, targets = gpus, 0
    if source is CaptureSource.hf and config.target.device_map is not None:
        processes = 1
    elif source is CaptureSource.vllm and config.capture.mode is CaptureMode.online:
        targets = 0 if config.vllm.servers else num_nodes // 2
    elif source is CaptureSource.torchspec:
        targets = num_nodes // 2
        free = gpus if targets else max(1, gpus - torchspec.num_engines * torchspec.gpus_per_engine)
        groups = range(free // train.row_ranks, 0, -1)
        processes = train.row_ranks * next((one for one in groups if train.rows_per_step % one == 0), 1)
    return Cluster(num_nodes - targets, gpus, processes, gpu_bytes, targets)
