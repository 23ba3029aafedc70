"""How a target is on GPUs during capture: replicas, GPUs of each, and bytes of weights."""

from dataclasses import dataclass

from train.config.run import RunConfig
from train.config.vllm import Placement
from train.planning.placement import Cluster, ServerPlacement
from train.planning.server_memory import Parallelism, ServerMemory
from train.planning.target import TargetSize


@dataclass(frozen=True)
class TargetOnGpus:
    """The GPUs that run the target."""

    num_replicas: int
    gpus_per_replica: int
    bytes_per_gpu: int  # of weights; the key-value cache and activations need more
    where: str  # in words

    @property
    def num_gpus(self) -> int:
        return self.num_replicas * self.gpus_per_replica


def target_in_vllm(
    config: RunConfig, cluster: Cluster, placement: ServerPlacement, memory: ServerMemory
) -> TargetOnGpus:
    """Return how servers hold the target.

    Args:
        memory: of a GPU of a server.
    """
    gpus = placement.gpus or Parallelism.of(config.vllm.engine_args).gpus
    servers = f"{placement.num_servers} server{'s' if placement.num_servers > 1 else ''}"
    size = f"{servers} of {gpus} GPU{'s' if gpus > 1 else ''}"
    where = {
        Placement.shared: f"{size}, shared with training",
        Placement.split: f"{size}, split from training",
        Placement.apart: f"{size}, apart on {cluster.capture_nodes} of the nodes",
    }[placement.kind]
    if cluster.gpus_per_node == 0:
        where = f"{servers} on the CPU"
    if config.vllm.servers:
        where = f"{servers} named in vllm.servers, taken to have {gpus} GPUs each"
    if placement.memory_fraction is not None:
        where += f"; vLLM takes {placement.memory_fraction:g} of each GPU"
    return TargetOnGpus(placement.num_servers, gpus, memory.weights, f"vLLM, {where}")


def target_elsewhere(config: RunConfig, cluster: Cluster, size: TargetSize) -> TargetOnGpus:
    """Return how transformers holds the target."""
    if config.target.device_map is None:
        copies = cluster.num_ranks
        return TargetOnGpus(copies, 1, size.checkpoint_bytes, "transformers, a copy in every process")
    gpus = max(1, cluster.gpus_per_node)
    text = f"transformers, spread over the {gpus} GPUs of a node"
    return TargetOnGpus(cluster.num_nodes, gpus, size.checkpoint_bytes // gpus, text)
