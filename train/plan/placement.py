"""Where the target's vLLM servers run: on the GPUs that train, on other GPUs, or on other nodes."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import torch

from data.addresses import is_loopback
from eagle31.errors import UserError
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import RunConfig, Stage
from train.config.target import TargetEngine
from train.config.vllm import Placement
from train.distributed import World
from train.plan.memory import USABLE_FRACTION
from train.plan.sizes import RunSizes
from train.plan.target import ALONE_FRACTION, Parallelism, ServerMemory

# Fraction of a GPU for the target's weights in transformers; a few sequences' keys and values take the rest.
TARGET_FRACTION = 0.85
# A training process that waits for the server: its CUDA context and the target's embedding or head.
_WAITING_BYTES = 2_000_000_000
_MARGIN = 0.1  # of training's memory
_USEFUL_SEQUENCES = 64  # of the greatest length; prefill gains nothing from a larger cache
_UTILIZATION = "vllm.engine_args.gpu_memory_utilization"
_OWN_GPUS = "vllm.placement=split, vllm.servers, or --target-nodes of scripts/submit"


@dataclass(frozen=True)
class Cluster:
    """The nodes of a run, the GPUs that each shows, and the training processes on each."""

    num_nodes: int  # nodes that train
    gpus_per_node: int  # 0 on a CPU
    processes_per_node: int
    gpu_bytes: int | None  # memory of one GPU; None: unknown, and not checked
    target_nodes: int = 0  # nodes on which scripts/submit starts servers

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.processes_per_node


@dataclass(frozen=True)
class ServerPlacement:
    """Where the servers of a run are."""

    kind: Placement  # never auto
    num_servers: int  # over all nodes
    gpus: int = 0  # GPUs of one server; 0 on a CPU, and for servers that were started by hand
    devices: tuple[int, ...] | None = None  # of each node's server, as indices of those that the node shows
    memory_fraction: float | None = None  # of each of these GPUs; None: vLLM's default
    # Arguments of the engine that follow from the placement, in addition to vllm.engine_args.
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def parallel(self, config: RunConfig) -> Parallelism:
        """Return how the engines of one server are split over its GPUs."""
        return Parallelism.of({**config.vllm.engine_args, **self.engine_args})


def cluster_at_hand(world: World) -> Cluster:
    """Return the cluster that this run was started on, from torchrun's environment and this node's GPUs."""
    gpus = torch.cuda.device_count()
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory if gpus else None
    return Cluster(world.num_nodes, gpus, world.ranks_per_node, gpu_bytes)


def place_servers(sizes: RunSizes, cluster: Cluster, *, writing: bool = False) -> ServerPlacement:
    """Return where the servers of a run are, with `vllm.placement=auto` where they work.

    Servers in `vllm.servers`, or on the cluster's target nodes, are apart. Otherwise each node that trains
    has one server. It is split from training where the node shows more GPUs than it has processes: processes
    train on GPUs 0 to n - 1, and the server gets the following ones. Else it shares them: online, vLLM gets
    the fraction of each GPU that the target needs, at most what training leaves; offline it ends before
    training. Engines are repeated, by data parallelism, until a server has all GPUs that it can use, unless
    the recipe sets a data-parallel size.

    Args:
        writing: whether they only write completions: they end before training then, and
            `vllm.placement=auto` has them share all GPUs.

    Raises:
        UserError: the servers cannot run there.
    """
    config, vllm = sizes.config, sizes.config.vllm
    _check_heads(sizes)
    _check_evaluation(config, cluster)
    if vllm.servers or cluster.target_nodes:
        return _apart(sizes, cluster)
    if vllm.placement is Placement.apart:
        remedy = "It needs vllm.servers, or --target-nodes of scripts/submit; or set vllm.placement=auto."
        raise UserError("vllm.placement", "apart", remedy)
    if cluster.gpus_per_node == 0:
        return _on_cpu(config, cluster)
    if vllm.placement is Placement.split:
        return _split(sizes, cluster)
    free = cluster.gpus_per_node > cluster.processes_per_node
    if vllm.placement is Placement.auto and free and not writing:
        with suppress(UserError):
            return _split(sizes, cluster)
    return _shared(sizes, cluster, online=_serves_training(config) and not writing)


def _apart(sizes: RunSizes, cluster: Cluster) -> ServerPlacement:
    config, vllm = sizes.config, sizes.config.vllm
    if vllm.placement in (Placement.shared, Placement.split):
        remedy = "The servers are on other nodes. Set vllm.placement=auto."
        raise UserError("vllm.placement", vllm.placement.value, remedy)
    if vllm.servers:
        for url in vllm.servers:
            if cluster.num_nodes > 1 and is_loopback(urlsplit(url).hostname):
                remedy = "Other nodes of this run cannot reach a loopback address; give the node's address."
                raise UserError("vllm.servers", url, remedy)
        return ServerPlacement(Placement.apart, len(vllm.servers))
    parallel = Parallelism.of(vllm.engine_args)
    if cluster.gpus_per_node == 0:
        return ServerPlacement(Placement.apart, cluster.target_nodes)
    _check_gpus(config, parallel, cluster.gpus_per_node, "on a node")
    _check_alone(sizes, cluster, parallel, _given_utilization(config) or ALONE_FRACTION)
    per_node = cluster.gpus_per_node // parallel.gpus
    return ServerPlacement(Placement.apart, cluster.target_nodes * per_node, parallel.gpus)


def _on_cpu(config: RunConfig, cluster: Cluster) -> ServerPlacement:
    if config.vllm.placement is Placement.split:
        raise UserError("vllm.placement", "split", "There is no GPU to divide. Set vllm.placement=auto.")
    return ServerPlacement(Placement.shared, cluster.num_nodes)


def _split(sizes: RunSizes, cluster: Cluster) -> ServerPlacement:
    config = sizes.config
    first, free = cluster.processes_per_node, cluster.gpus_per_node - cluster.processes_per_node
    if free < 1:
        remedy = (
            f"Each of the {cluster.gpus_per_node} GPUs of a node has a training process: start fewer "
            "(--nproc-per-node of torchrun), or set vllm.placement=auto."
        )
        raise UserError("vllm.placement", config.vllm.placement.value, remedy)
    parallel = _filled(config, free)
    _check_gpus(config, parallel, free, "on a node where nothing trains")
    fraction = _given_utilization(config) or ALONE_FRACTION
    _check_alone(sizes, cluster, parallel, fraction)
    devices = tuple(range(first, first + parallel.gpus))
    return _placement(cluster, Placement.split, parallel, devices, fraction)


def _shared(sizes: RunSizes, cluster: Cluster, online: bool) -> ServerPlacement:
    config = sizes.config
    parallel = _filled(config, cluster.gpus_per_node)
    _check_gpus(config, parallel, cluster.gpus_per_node, "on a node")
    given = _given_utilization(config)
    if cluster.gpu_bytes is None:
        fraction = given or (ALONE_FRACTION / 2 if online else ALONE_FRACTION - 0.1)
        return _placement(cluster, Placement.shared, parallel, tuple(range(parallel.gpus)), fraction)
    gpu, server = cluster.gpu_bytes, sizes.server(parallel)
    trainer = sizes.trainer(cluster.num_ranks, "cuda").total if online else _WAITING_BYTES
    room = int(gpu * (USABLE_FRACTION if online else ALONE_FRACTION)) - trainer
    smallest = server.least
    # Training's memory is an estimate: vLLM leaves it more where it needs less.
    useful = min(server.total(_USEFUL_SEQUENCES), int(room - _MARGIN * trainer)) if online else room
    useful = max(useful, min(smallest, room))
    fraction = given or math.floor(useful / gpu * 1000) / 1000
    # The chosen fraction is rounded down.
    if smallest > (room if given is None else fraction * gpu) or fraction * gpu > room:
        _refuse_shared(sizes, cluster, server, trainer, online, given)
    return _placement(cluster, Placement.shared, parallel, tuple(range(parallel.gpus)), fraction)


def _serves_training(config: RunConfig) -> bool:
    return config.capture.source is CaptureSource.vllm and config.capture.mode is CaptureMode.online


def _refuse_shared(
    sizes: RunSizes, cluster: Cluster, server: ServerMemory, trainer: int, online: bool, given: float | None
) -> None:
    gpu = cluster.gpu_bytes
    assert gpu is not None
    remedy = (
        f"On each GPU of {gpu / 1e9:.0f} GB vLLM needs {server.least / 1e9:.1f} GB "
        f"(weights {server.weights / 1e9:.1f}) and {'training' if online else 'the waiting process'} "
        f"{trainer / 1e9:.1f} GB."
    )
    if given is not None:
        raise UserError(_UTILIZATION, given, f"{remedy} Give another one, or none.")
    fits = trainer <= USABLE_FRACTION * gpu and sizes.target.checkpoint_bytes <= TARGET_FRACTION * gpu
    if cluster.gpus_per_node == 1 and fits:
        in_vllm = sizes.config.capture.source is CaptureSource.vllm
        remedy += f" Set {'machine=one_gpu' if in_vllm else 'target.engine=hf'}: transformers needs less."
    else:
        smaller = "Lower training's memory (deepspeed.zero_stage=2, train.rollout_chunk=4096), set "
        remedy += f" {smaller if online else 'Set '}a larger vllm.engine_args.tensor_parallel_size, or give "
        remedy += f"the target GPUs of its own: {_OWN_GPUS}."
    raise UserError("vllm.placement", Placement.shared.value, remedy)


def _check_alone(sizes: RunSizes, cluster: Cluster, parallel: Parallelism, fraction: float) -> None:
    """Check that a server fits GPUs on which nothing trains."""
    if cluster.gpu_bytes is None:
        return
    server = sizes.server(parallel)
    needed = server.least
    if needed > fraction * cluster.gpu_bytes:
        remedy = (
            f"vLLM needs {needed / 1e9:.1f} GB of each of {parallel.gpus} GPUs (weights "
            f"{server.weights / 1e9:.1f}), and has {fraction:g} of {cluster.gpu_bytes / 1e9:.0f} GB: raise "
        )
        if _given_utilization(sizes.config) is not None:
            raise UserError(_UTILIZATION, fraction, f"{remedy}it, or leave it out.")
        field = "vllm.engine_args.tensor_parallel_size"
        shorter = "lower data.max_tokens and train.row_tokens"
        raise UserError(field, parallel.tensor, f"{remedy}it, {shorter}, or use larger GPUs.")


def _check_gpus(config: RunConfig, parallel: Parallelism, gpus: int, of_what: str) -> None:
    if parallel.gpus > gpus:
        name = "tensor_parallel_size" if parallel.tensor > gpus else "data_parallel_size"
        remedy = f"A server takes {parallel.gpus} GPUs, and there are {gpus} {of_what}: lower it."
        raise UserError(f"vllm.engine_args.{name}", config.vllm.engine_args.get(name), remedy)


def _check_heads(sizes: RunSizes) -> None:
    """Check that vLLM can divide the target among the GPUs of an engine."""
    tensor = Parallelism.of(sizes.config.vllm.engine_args).tensor
    heads = sizes.target_config.get_text_config().num_attention_heads
    if heads % tensor:
        remedy = f"It must divide the target's {heads} attention heads, which these GPUs share equally."
        raise UserError("vllm.engine_args.tensor_parallel_size", tensor, remedy)


def _check_evaluation(config: RunConfig, cluster: Cluster) -> None:
    """Check that the evaluate stage, which runs the target on the first node that trains, has GPUs for it."""
    if config.target.engine is not TargetEngine.vllm or Stage.evaluate not in config.stages:
        return
    parallel = Parallelism.of(config.vllm.engine_args)
    if cluster.gpus_per_node:
        _check_gpus(config, parallel, cluster.gpus_per_node, "on a node that trains and evaluates")


def _filled(config: RunConfig, gpus: int) -> Parallelism:
    """Return the recipe's parallelism, with as many engines as there are GPUs for."""
    parallel = Parallelism.of(config.vllm.engine_args)
    return parallel if parallel.given else replace(parallel, data=max(1, gpus // parallel.tensor))


def _given_utilization(config: RunConfig) -> float | None:
    return config.vllm.engine_args.get("gpu_memory_utilization")


def _placement(
    cluster: Cluster, kind: Placement, parallel: Parallelism, devices: tuple[int, ...], fraction: float
) -> ServerPlacement:
    engine_args: dict[str, Any] = {"gpu_memory_utilization": fraction}
    if parallel.data > 1 and not parallel.given:
        engine_args["data_parallel_size"] = parallel.data
    return ServerPlacement(kind, cluster.num_nodes, parallel.gpus, devices, fraction, engine_args)
