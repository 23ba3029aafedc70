"""The placement of a run's servers on the GPUs at hand, and whether their memory is enough."""

from collections.abc import Collection

import torch

from eagle31.errors import UserError
from train.config.run import RunConfig, Stage, uses_vllm
from train.distributed import World
from train.planning.layout import layout
from train.planning.memory_check import TRAINING
from train.planning.placement import Cluster, ServerPlacement, place_servers
from train.planning.sizes import RunSizes
from train.planning.work import work_plan


def run_placement(config: RunConfig, world: World) -> ServerPlacement | None:
    """Return where the vLLM servers of this run are; None where the run uses none.

    Every rank gets the same answer if the nodes are alike.

    Raises:
        UserError: the servers cannot run there. The remedy is a change with which they can.
    """
    vllm = config.vllm
    if not uses_vllm(config):
        if vllm.gpu_memory_fraction is not None:
            remedy = "Nothing in this run uses vLLM. Set vllm.gpu_memory_fraction=null."
            raise UserError("vllm.gpu_memory_fraction", vllm.gpu_memory_fraction, remedy)
        return None
    if config.launcher.capture_nodes and not vllm.servers:
        remedy = "Only scripts/submit starts servers on other nodes. Set launcher.capture_nodes=0."
        raise UserError("launcher.capture_nodes", config.launcher.capture_nodes, remedy)
    cluster = cluster_at_hand(world)
    sizes = RunSizes(config).on_gpus(cluster.num_ranks) if cluster.gpus_per_node else None
    return place_servers(config, cluster, sizes)


def cluster_at_hand(world: World) -> Cluster:
    """Return the cluster that this run was started on, from torchrun's environment and this node's GPUs."""
    gpus = torch.cuda.device_count()
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory if gpus else None
    return Cluster(world.num_nodes, gpus, world.size // world.num_nodes, gpu_bytes)


def check_gpu_memory(config: RunConfig, cluster: Cluster, stages: Collection[Stage]) -> None:
    """Check that these stages have enough memory on each GPU, by the plan's estimate.

    Raises:
        UserError: they have not. The remedy is a change with which they have.
    """
    if cluster.gpu_bytes is None or not config.plan.check_memory:
        return
    sizes = RunSizes(config)
    work = work_plan(config, sizes.drafter, sizes.target.parameters, {})
    for shortage in layout(config, sizes, work, cluster).shortages:
        trains = shortage.what == TRAINING
        if (Stage.train if trains else Stage.capture) in stages:
            field = "train.row_tokens" if trains else "target.model"
            value = config.train.row_tokens if trains else config.target.model
            remedy = f"By the plan's estimate, {shortage} plan.check_memory=false runs it all the same."
            raise UserError(field, value, remedy)
