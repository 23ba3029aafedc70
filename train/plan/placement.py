"""Where the target runs: in transformers, in vLLM's servers or in TorchSpec's engines, and on which GPUs."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from data.capture.vllm.arguments import check_final_states
from eagle31.errors import UserError
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import RunConfig, Stage
from train.config.target import TargetEngine
from train.plan.cluster import Cluster
from train.plan.memory import USABLE_FRACTION
from train.plan.sizes import RunSizes
from train.plan.target import ALONE_FRACTION, Parallelism, ServerMemory
from train.tables import counted

# Fraction of a GPU for the target's weights in transformers; a few sequences' keys and values take the rest.
TARGET_FRACTION = 0.85
# A training process that waits for the server: its CUDA context and the target's embedding or head.
_WAITING_BYTES = 2_000_000_000
_MARGIN = 0.1  # of training's memory
_USEFUL_SEQUENCES = 64  # of the greatest length; prefill gains nothing from a larger cache
_FRACTION = "gpu_memory_utilization"
RAY_ADDRESS = "RAY_ADDRESS"  # Ray's own variable
Kind = Literal["shared", "split", "apart"]
_WHERE: dict[Kind, str] = {
    "shared": "shared with training",
    "split": "split from training",
    "apart": "on nodes of their own",
}


@dataclass(frozen=True)
class TargetPlacement:
    """The GPUs that run the target, and what its vLLM servers are started with."""

    kind: Kind  # transformers shares the GPUs that train
    num_replicas: int  # over all nodes: servers, engines, or copies in processes
    gpus: int  # of one replica
    bytes_per_gpu: int  # of weights; the key-value cache and activations need more
    where: str  # in words
    num_at_work: int  # GPUs that compute at the same time, of all replicas
    server: ServerMemory | None = None  # on each GPU of a vLLM server; None: another engine
    devices: tuple[int, ...] | None = None  # of each node's server, as indices of those that the node shows
    # Arguments of vLLM's engine that follow from the placement, in addition to vllm.engine_args.
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    held_bytes: int = 0  # of each GPU that trains, while it trains
    remedy: str = ""  # where bytes_per_gpu do not fit; empty: that has been checked, or cannot be


def place_target(sizes: RunSizes, cluster: Cluster, *, writing: bool = False) -> TargetPlacement:
    """Return where the target captures or, if `writing`, where it only writes completions.

    Raises:
        UserError: it cannot run there.
    """
    config, source = sizes.config, sizes.config.capture.source
    if writing:
        if config.target.engine is TargetEngine.hf:
            copies = cluster.num_nodes * max(1, cluster.gpus_per_node)
            return _in_transformers(sizes, cluster, copies)
        # Only servers that capture have nodes of their own.
        targets = cluster.target_nodes if source is CaptureSource.vllm else 0
        return _in_servers(sizes, replace(cluster, target_nodes=targets), writing=True)
    if source is CaptureSource.vllm:
        check_final_states(sizes.target_config)
        return _in_servers(sizes, cluster)
    if source is CaptureSource.torchspec:
        return _in_torchspec(sizes, cluster)
    processes, device_map = cluster.processes_per_node, config.target.device_map
    if device_map is not None and processes > 1:
        remedy = f"Each of a node's {processes} processes would spread a copy: start one on each node."
        raise UserError("target.device_map", device_map, remedy)
    return _in_transformers(sizes, cluster, cluster.num_ranks)


def _in_transformers(sizes: RunSizes, cluster: Cluster, copies: int) -> TargetPlacement:
    gpus, where = 1, "a copy in every process"
    if sizes.config.target.device_map is not None:
        copies, gpus = cluster.num_nodes, max(1, cluster.gpus_per_node)
        where = f"spread over the {gpus} GPUs of a node, which compute in turn"
    size = sizes.target.checkpoint_bytes // gpus
    remedy = "Set target.engine=vllm."
    if sizes.config.capture.source is CaptureSource.hf:
        remedy = "Set capture=vllm with vllm.engine_args.tensor_parallel_size, or target.device_map=auto."
    return TargetPlacement(
        "shared",
        copies,
        gpus,
        size,
        f"transformers, {where}",
        num_at_work=copies,
        held_bytes=size if sizes.config.capture.mode is CaptureMode.online else 0,
        remedy=remedy if cluster.gpus_per_node > 1 else "Use several GPUs, or larger ones.",
    )


def _in_torchspec(sizes: RunSizes, cluster: Cluster) -> TargetPlacement:
    """Check that the engines have GPUs: those of nodes that do not train, or of the only node.

    A run on one node starts Ray itself, for the GPUs that no process trains on.
    """
    engines, gpus = sizes.config.torchspec.num_engines, sizes.config.torchspec.gpus_per_engine
    free = cluster.target_nodes * cluster.gpus_per_node
    by_run = not (cluster.target_nodes or os.environ.get(RAY_ADDRESS))
    if by_run:
        if cluster.num_nodes > 1:
            remedy = "With several nodes, start Ray on each of them and set it: `stages=[plan]` prints how."
            raise UserError(RAY_ADDRESS, "", remedy)
        free = cluster.gpus_per_node - cluster.processes_per_node
    known = bool(cluster.gpus_per_node and (by_run or cluster.target_nodes))
    if known and engines * gpus > free:
        remedy = (
            f"The engines take {engines * gpus} GPUs, and {max(0, free)} have no training process: start "
            f"fewer (--nproc-per-node of torchrun), or start Ray on other nodes and set {RAY_ADDRESS}."
        )
        raise UserError("torchspec.gpus_per_engine", gpus, remedy)
    counts = f"{counted(engines, 'engine')} of {counted(gpus, 'GPU')}"
    where = f"TorchSpec, {counts} ({sizes.config.torchspec.engine.value}) in Ray"
    size = sizes.target.checkpoint_bytes // gpus
    remedy = "Raise torchspec.gpus_per_engine, or use larger GPUs." if known else ""
    return TargetPlacement("apart", engines, gpus, size, where, num_at_work=engines * gpus, remedy=remedy)


def _in_servers(sizes: RunSizes, cluster: Cluster, *, writing: bool = False) -> TargetPlacement:
    """Return where the vLLM servers of a run are.

    Servers in `vllm.servers`, or on the cluster's target nodes, are apart. Otherwise each node that trains
    has one server. It is split from training where the node has more GPUs than processes, and they are enough
    for the target: processes train on GPUs 0 to n - 1, and the server gets the following ones. Else it shares
    them: online, vLLM gets the fraction of each GPU that the target needs, at most what training leaves;
    offline it ends before training. Engines are repeated, by data parallelism, until a server has all GPUs
    that it can use, unless the recipe sets a data-parallel size.

    Args:
        writing: whether they only write completions: they end before training then, and share all GPUs.
    """
    config, servers, gpus = sizes.config, sizes.config.vllm.servers, cluster.gpus_per_node
    parallel = Parallelism.of(config.vllm.engine_args)
    if gpus and config.target.engine is TargetEngine.vllm and Stage.evaluate in config.stages:
        _check_gpus(config, parallel, gpus, "on a node that trains and evaluates")
    if servers:
        local = set(servers).difference(config.vllm.remote_servers)
        if local and cluster.num_nodes > 1:
            remedy = "Other nodes of this run cannot reach a loopback address; give the node's address."
            raise UserError("vllm.servers", min(local), remedy)
        where = f"named in vllm.servers, taken to have {parallel.gpus} GPUs each"
        return _servers(sizes, "apart", len(servers), parallel, where)
    if gpus == 0:
        kind: Kind = "apart" if cluster.target_nodes else "shared"
        return _servers(sizes, kind, cluster.target_nodes or cluster.num_nodes, parallel, "on the CPU")
    if cluster.target_nodes:
        _check_gpus(config, parallel, gpus, "on a node")
        _check_alone(sizes, cluster, parallel)
        where = f"of {counted(parallel.gpus, 'GPU')}, {_WHERE['apart']}"
        number = cluster.target_nodes * (gpus // parallel.gpus)
        return _servers(sizes, "apart", number, parallel, where)
    if gpus > cluster.processes_per_node and not writing:
        with suppress(UserError):
            return _split(sizes, cluster)
    return _shared(sizes, cluster, online=config.capture.mode is CaptureMode.online and not writing)


def _split(sizes: RunSizes, cluster: Cluster) -> TargetPlacement:
    first = cluster.processes_per_node
    free = cluster.gpus_per_node - first
    parallel = _filled(sizes.config, free)
    _check_gpus(sizes.config, parallel, free, "on a node where nothing trains")
    fraction = _check_alone(sizes, cluster, parallel)
    return _started_by_run(sizes, cluster, "split", parallel, fraction, first)


def _shared(sizes: RunSizes, cluster: Cluster, online: bool) -> TargetPlacement:
    config, gpu = sizes.config, cluster.gpu_bytes
    parallel = _filled(config, cluster.gpus_per_node)
    _check_gpus(config, parallel, cluster.gpus_per_node, "on a node")
    given = config.vllm.engine_args.get(_FRACTION)
    if gpu is None:
        fraction = given or (ALONE_FRACTION / 2 if online else ALONE_FRACTION - 0.1)
        return _started_by_run(sizes, cluster, "shared", parallel, fraction)
    server = sizes.server(parallel)
    trainer = sizes.trainer(cluster.num_ranks, "cuda").total if online else _WAITING_BYTES
    room = int(gpu * (USABLE_FRACTION if online else ALONE_FRACTION)) - trainer
    # Training's memory is an estimate: vLLM leaves it more where it needs less.
    useful = min(server.total(_USEFUL_SEQUENCES), int(room - _MARGIN * trainer)) if online else room
    useful = max(useful, min(server.least, room))
    fraction = given or math.floor(useful / gpu * 1000) / 1000
    # The chosen fraction is rounded down.
    if server.least <= (room if given is None else fraction * gpu) and fraction * gpu <= room:
        return _started_by_run(sizes, cluster, "shared", parallel, fraction)
    remedy = (
        f"On each GPU of {gpu / 1e9:.0f} GB vLLM needs {server.least / 1e9:.1f} GB "
        f"(weights {server.weights / 1e9:.1f}) and {'training' if online else 'the waiting process'} "
        f"{trainer / 1e9:.1f} GB."
    )
    if given is not None:
        raise _refused(_FRACTION, given, f"{remedy} Give another one, or none.")
    fits = trainer <= USABLE_FRACTION * gpu and sizes.target.checkpoint_bytes <= TARGET_FRACTION * gpu
    if cluster.gpus_per_node == 1 and fits:
        if config.capture.source is CaptureSource.vllm:
            raise UserError(
                "capture.source", "vllm", f"{remedy} Set machine=one_gpu: transformers needs less."
            )
        raise UserError("target.engine", "vllm", f"{remedy} Set target.engine=hf: transformers needs less.")
    ways = ["raise it"] if parallel.tensor < cluster.gpus_per_node else []
    if online:
        ways.append(f"have training take less: {sizes.smaller_training(cluster.num_ranks)}")
    if cluster.gpus_per_node > 1:
        ways.append(
            "start fewer processes (--nproc-per-node of torchrun), so that the target has separate GPUs"
        )
    remedy += f" Either {'; '.join([*ways, 'or name servers on other nodes in vllm.servers'])}."
    raise _refused("tensor_parallel_size", parallel.tensor, remedy)


def _check_alone(sizes: RunSizes, cluster: Cluster, parallel: Parallelism) -> float:
    """Return the fraction of each GPU that a server gets where nothing trains; raise UserError if it is less
    than it needs.
    """
    given = sizes.config.vllm.engine_args.get(_FRACTION)
    fraction, server = given or ALONE_FRACTION, sizes.server(parallel)
    if cluster.gpu_bytes is not None and server.least > fraction * cluster.gpu_bytes:
        remedy = (
            f"vLLM needs {server.least / 1e9:.1f} GB of each of its {counted(parallel.gpus, 'GPU')} (weights "
            f"{server.weights / 1e9:.1f}), and has {fraction:g} of {cluster.gpu_bytes / 1e9:.0f} GB: "
        )
        if given is not None:
            raise _refused(_FRACTION, fraction, f"{remedy}raise it, or leave it out.")
        remedy += "raise it, " if parallel.tensor < cluster.gpus_per_node else ""
        remedy += "lower data.max_tokens and train.row_tokens, or use larger GPUs."
        raise _refused("tensor_parallel_size", parallel.tensor, remedy)
    return fraction


def _check_gpus(config: RunConfig, parallel: Parallelism, gpus: int, of_what: str) -> None:
    if parallel.gpus > gpus:
        name = "tensor_parallel_size" if parallel.tensor > gpus else "data_parallel_size"
        remedy = f"A server takes {parallel.gpus} GPUs, and there are {gpus} {of_what}: lower it."
        raise _refused(name, config.vllm.engine_args.get(name), remedy)


def _refused(argument: str, value: Any, remedy: str) -> UserError:
    return UserError(f"vllm.engine_args.{argument}", value, remedy)


def _filled(config: RunConfig, gpus: int) -> Parallelism:
    """Return the recipe's parallelism, with as many engines as there are GPUs for."""
    parallel = Parallelism.of(config.vllm.engine_args)
    return parallel if parallel.given else replace(parallel, data=max(1, gpus // parallel.tensor))


def _started_by_run(
    sizes: RunSizes, cluster: Cluster, kind: Kind, parallel: Parallelism, fraction: float, first: int = 0
) -> TargetPlacement:
    """Return a server on each node that trains, which has a fraction of its GPUs from the first on."""
    engine_args: dict[str, Any] = {_FRACTION: fraction}
    if parallel.data > 1 and not parallel.given:
        engine_args["data_parallel_size"] = parallel.data
    of = f"of {counted(parallel.gpus, 'GPU')}, {_WHERE[kind]}; vLLM takes {fraction:g} of each GPU"
    devices = tuple(range(first, first + parallel.gpus))
    found = _servers(sizes, kind, cluster.num_nodes, parallel, of)
    return replace(found, devices=devices, engine_args=engine_args)


def _servers(sizes: RunSizes, kind: Kind, number: int, parallel: Parallelism, where: str) -> TargetPlacement:
    server = sizes.server(parallel)
    where = f"vLLM, {counted(number, 'server')} {where}"
    at_work = number * parallel.gpus
    return TargetPlacement(kind, number, parallel.gpus, server.weights, where, at_work, server)
