"""Where the target's vLLM servers run: on the GPUs that train, on other GPUs, or on other nodes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from data.addresses import is_loopback
from eagle31.errors import UserError
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import RunConfig, Stage
from train.config.target import TargetEngine
from train.config.vllm import Placement
from train.planning.memory import USABLE_FRACTION
from train.planning.remedies import Change, assignments, repaired
from train.planning.server_memory import CAPTURED_SEQUENCES, Parallelism, ServerMemory

# Fraction of a GPU for a server that shares it with no training.
_ALONE_FRACTION = 0.9
# A training process that waits for the server: its CUDA context and the target's embedding or head.
_WAITING_BYTES = 2_000_000_000
_MARGIN = 0.1  # of training's memory


@dataclass(frozen=True)
class Cluster:
    """The nodes of a run, the GPUs that each shows, and the training processes on each."""

    num_nodes: int  # nodes that train
    gpus_per_node: int  # 0 on a CPU
    processes_per_node: int
    gpu_bytes: int | None  # memory of one GPU; None: unknown, and not checked
    capture_nodes: int = 0  # nodes on which scripts/submit starts servers

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.processes_per_node


@dataclass(frozen=True)
class Sizes:
    """Bytes that a placement has to find room for, as functions of the configuration."""

    server: Callable[[RunConfig, Parallelism], ServerMemory]  # on each GPU of a server
    trainer: Callable[[RunConfig], int]  # peak on each GPU that trains


@dataclass(frozen=True)
class ServerPlacement:
    """Where the servers of a run are."""

    kind: Placement  # never auto
    num_servers: int  # over all nodes
    gpus: int = 0  # GPUs of one server; 0 on a CPU, and for servers that were started by hand
    devices: tuple[int, ...] | None = (
        None  # GPUs of each node's server, as indices of those that the node shows
    )
    memory_fraction: float | None = None  # of each of these GPUs; None: vLLM's default
    # Arguments of the engine that follow from the placement, in addition to vllm.engine_args.
    engine_args: Mapping[str, Any] = field(default_factory=dict)


def serves_training(config: RunConfig) -> bool:
    """Return whether vLLM runs the target while the drafter is trained."""
    return config.capture.source is CaptureSource.vllm and config.capture.mode is CaptureMode.online


def place_servers(config: RunConfig, cluster: Cluster, sizes: Sizes | None) -> ServerPlacement:
    """Return where the servers of a run are, with `vllm.placement=auto` where they work.

    Servers in `vllm.servers`, or on the cluster's capture nodes, are apart. Otherwise each node that trains
    has one server. It is split from training where the node shows more GPUs than it has processes: processes
    train on GPUs 0 to n - 1, and the server gets the following ones. Else it shares them: online, vLLM gets
    the fraction of each GPU that the target needs, at most what training leaves; offline it ends before
    training. Engines are repeated, by data parallelism, until a server has all GPUs that it can use, unless
    the recipe sets a data-parallel size.

    Args:
        sizes: None leaves memory unchecked.

    Raises:
        CannotPlace: the servers cannot run there. The remedy is a change with which they can.
    """
    try:
        return _placed(config, cluster, sizes)
    except _Refused as refused:
        change = repaired(config, lambda changed: _works(changed, cluster, sizes), cluster.gpus_per_node)
        raise CannotPlace(refused, change) from None


class CannotPlace(UserError):
    """The servers of a run cannot run where its configuration places them."""

    def __init__(self, refused: "_Refused", change: Change) -> None:
        remedy = f"{refused.reason} Set {assignments(change)}."
        super().__init__(refused.field, refused.value, remedy)
        self.change = change  # after which they can


class _Refused(Exception):
    """A placement that cannot work."""

    def __init__(self, field: str, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.field, self.value, self.reason = field, value, reason


def _works(config: RunConfig, cluster: Cluster, sizes: Sizes | None) -> bool:
    try:
        _placed(config, cluster, sizes)
    except _Refused:
        return False
    return True


def _placed(config: RunConfig, cluster: Cluster, sizes: Sizes | None) -> ServerPlacement:
    vllm = config.vllm
    _check_evaluation(config, cluster)
    if vllm.servers or cluster.capture_nodes:
        return _apart(config, cluster, sizes)
    if vllm.placement is Placement.apart:
        reason = "It needs vllm.servers, or with scripts/submit launcher.capture_nodes."
        raise _Refused("vllm.placement", "apart", reason)
    if cluster.gpus_per_node == 0:
        return _on_cpu(config, cluster)
    if vllm.placement is Placement.split:
        return _split(config, cluster, sizes)
    if vllm.placement is Placement.auto and cluster.gpus_per_node > cluster.processes_per_node:
        try:
            return _split(config, cluster, sizes)
        except _Refused:
            if not _works(with_placement(config, Placement.shared), cluster, sizes):
                raise
    return _shared(config, cluster, sizes)


def with_placement(config: RunConfig, kind: Placement) -> RunConfig:
    """Return the configuration with another `vllm.placement`."""
    return replace(config, vllm=replace(config.vllm, placement=kind))


def _apart(config: RunConfig, cluster: Cluster, sizes: Sizes | None) -> ServerPlacement:
    vllm = config.vllm
    if vllm.placement in (Placement.shared, Placement.split):
        where = "vllm.servers are" if vllm.servers else "With launcher.capture_nodes, servers are"
        reason = f"{where} on GPUs that this run does not divide."
        raise _Refused("vllm.placement", vllm.placement.value, reason)
    if vllm.gpu_memory_fraction is not None:
        reason = "It is for servers that the run starts; scripts/serve_target takes vllm.engine_args."
        raise _Refused("vllm.gpu_memory_fraction", vllm.gpu_memory_fraction, reason)
    if vllm.servers:
        for url in vllm.servers:
            if cluster.num_nodes + cluster.capture_nodes > 1 and is_loopback(urlsplit(url).hostname):
                reason = "Other nodes of this run cannot reach a loopback address; give the node's."
                raise _Refused("vllm.servers", url, reason)
        return ServerPlacement(Placement.apart, len(vllm.servers))
    parallel = Parallelism.of(vllm.engine_args)
    if cluster.gpus_per_node == 0:
        return ServerPlacement(Placement.apart, cluster.capture_nodes)
    _check_gpus(config, parallel, cluster.gpus_per_node, "on a node")
    _check_alone(config, cluster, sizes, parallel, _ALONE_FRACTION)
    # A job starts the servers that the launcher states. Without a launcher, the plan fills the nodes.
    stated = config.launcher.servers_per_node if config.launcher.capture_nodes else None
    per_node = stated or cluster.gpus_per_node // parallel.gpus
    return ServerPlacement(Placement.apart, cluster.capture_nodes * per_node, parallel.gpus)


def _on_cpu(config: RunConfig, cluster: Cluster) -> ServerPlacement:
    vllm = config.vllm
    if vllm.placement is Placement.split:
        raise _Refused("vllm.placement", "split", "There is no GPU to divide.")
    if vllm.gpu_memory_fraction is not None:
        raise _Refused("vllm.gpu_memory_fraction", vllm.gpu_memory_fraction, "There is no GPU.")
    return ServerPlacement(Placement.shared, cluster.num_nodes)


def _split(config: RunConfig, cluster: Cluster, sizes: Sizes | None) -> ServerPlacement:
    first, free = cluster.processes_per_node, cluster.gpus_per_node - cluster.processes_per_node
    if free < 1:
        reason = f"Each of the {cluster.gpus_per_node} GPUs of a node has a training process."
        raise _Refused("vllm.placement", config.vllm.placement.value, reason)
    parallel = _filled(config, free)
    _check_gpus(config, parallel, free, "on a node where nothing trains")
    fraction = config.vllm.gpu_memory_fraction or _given_utilization(config) or _ALONE_FRACTION
    _check_alone(config, cluster, sizes, parallel, fraction)
    devices = tuple(range(first, first + parallel.gpus))
    return _placement(config, cluster, Placement.split, parallel, devices, fraction)


def _shared(config: RunConfig, cluster: Cluster, sizes: Sizes | None) -> ServerPlacement:
    parallel = _filled(config, cluster.gpus_per_node)
    _check_gpus(config, parallel, cluster.gpus_per_node, "on a node")
    given = config.vllm.gpu_memory_fraction or _given_utilization(config)
    if sizes is None or cluster.gpu_bytes is None:
        fraction = given or (_ALONE_FRACTION / 2 if serves_training(config) else _ALONE_FRACTION - 0.1)
    else:
        gpu, server = cluster.gpu_bytes, sizes.server(config, parallel)
        online = serves_training(config)
        trainer = sizes.trainer(config) if online else _WAITING_BYTES
        room = int(gpu * (USABLE_FRACTION if online else _ALONE_FRACTION)) - trainer
        smallest = server.total(CAPTURED_SEQUENCES)
        # Training's memory is an estimate: vLLM leaves it more where it needs less.
        useful = min(server.total(num_sequences(config)), int(room - _MARGIN * trainer)) if online else room
        useful = max(useful, min(smallest, room))
        fraction = given or math.floor(useful / gpu * 1000) / 1000
        # The chosen fraction is rounded down.
        if smallest > (room if given is None else fraction * gpu) or fraction * gpu > room:
            raise _too_large(config, server, trainer, gpu, given, online)
    return _placement(config, cluster, Placement.shared, parallel, tuple(range(parallel.gpus)), fraction)


def num_sequences(config: RunConfig) -> int:
    """Return how many sequences of the greatest length an engine can use room for."""
    writes = config.target.engine is TargetEngine.vllm
    return max(CAPTURED_SEQUENCES, config.vllm.max_concurrency if writes else 0)


def _too_large(
    config: RunConfig, server: ServerMemory, trainer: int, gpu: int, given: float | None, online: bool
) -> _Refused:
    other = "training" if online else "the waiting process"
    reason = (
        f"On each GPU of {gpu / 1e9:.0f} GB vLLM needs {server.total(CAPTURED_SEQUENCES) / 1e9:.1f} GB "
        f"(weights {server.weights / 1e9:.1f}) and {other} {trainer / 1e9:.1f} GB"
    )
    if given is not None and config.vllm.gpu_memory_fraction is not None:
        return _Refused("vllm.gpu_memory_fraction", given, f"{reason}.")
    return _Refused("vllm.placement", Placement.shared.value, f"{reason}, which is too much.")


def _check_alone(
    config: RunConfig, cluster: Cluster, sizes: Sizes | None, parallel: Parallelism, fraction: float
) -> None:
    """Check that a server fits GPUs on which nothing trains."""
    if sizes is None or cluster.gpu_bytes is None:
        return
    server = sizes.server(config, parallel)
    needed = server.total(CAPTURED_SEQUENCES)
    if needed > fraction * cluster.gpu_bytes:
        available = f"{fraction:g} of {cluster.gpu_bytes / 1e9:.0f} GB"
        reason = (
            f"vLLM needs {needed / 1e9:.1f} GB of each of {parallel.gpus} GPUs (weights "
            f"{server.weights / 1e9:.1f}), and has {available}."
        )
        if config.vllm.gpu_memory_fraction is not None:
            raise _Refused("vllm.gpu_memory_fraction", fraction, reason)
        raise _Refused("vllm.engine_args.tensor_parallel_size", parallel.tensor, reason)


def _check_gpus(config: RunConfig, parallel: Parallelism, gpus: int, of_what: str) -> None:
    if parallel.gpus > gpus:
        name = "tensor_parallel_size" if parallel.tensor > gpus else "data_parallel_size"
        reason = f"A server takes {parallel.gpus} GPUs, and there are {gpus} {of_what}."
        raise _Refused(f"vllm.engine_args.{name}", config.vllm.engine_args.get(name), reason)


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
    config: RunConfig,
    cluster: Cluster,
    kind: Placement,
    parallel: Parallelism,
    devices: tuple[int, ...],
    fraction: float,
) -> ServerPlacement:
    engine_args: dict[str, Any] = {"gpu_memory_utilization": fraction}
    if parallel.data > 1 and not parallel.given:
        engine_args["data_parallel_size"] = parallel.data
    return ServerPlacement(kind, cluster.num_nodes, parallel.gpus, devices, fraction, engine_args)
