"""Where the target runs: in transformers, in vLLM's servers or in TorchSpec's engines, and on which GPUs."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from data.addresses import is_loopback
from data.capture.vllm.arguments import check_final_states
from eagle31.errors import UserError
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import RunConfig, Stage
from train.config.target import TargetEngine
from train.config.vllm import Placement
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
_UTILIZATION = "vllm.engine_args.gpu_memory_utilization"
_OWN_GPUS = "vllm.placement=split, vllm.servers, or --target-nodes of scripts/submit"
RAY_ADDRESS = "RAY_ADDRESS"  # Ray's own variable
_WHERE = {
    Placement.shared: "shared with training",
    Placement.split: "split from training",
    Placement.apart: "on nodes of their own",
}


@dataclass(frozen=True)
class TargetPlacement:
    """The GPUs that run the target, and what its vLLM servers are started with."""

    kind: Placement  # never auto; transformers shares the GPUs that train
    num_replicas: int  # over all nodes: servers, engines, or copies in processes
    gpus: int  # of one replica
    bytes_per_gpu: int  # of weights; the key-value cache and activations need more
    where: str  # in words
    server: ServerMemory | None = None  # on each GPU of a vLLM server; None: another engine
    devices: tuple[int, ...] | None = None  # of each node's server, as indices of those that the node shows
    memory_fraction: float | None = None  # of each of these GPUs; None: vLLM's default
    # Arguments of vLLM's engine that follow from the placement, in addition to vllm.engine_args.
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    in_turn: bool = False  # whether the GPUs of a replica compute one after the other
    held_bytes: int = 0  # of each GPU that trains, while it trains
    remedy: str = ""  # where bytes_per_gpu do not fit; empty: that has been checked

    @property
    def num_at_work(self) -> int:
        """The GPUs that compute at the same time."""
        return self.num_replicas * (1 if self.in_turn else self.gpus)


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
    spread = sizes.config.target.device_map is not None
    if spread:
        copies, gpus = cluster.num_nodes, max(1, cluster.gpus_per_node)
        where = f"spread over the {gpus} GPUs of a node, which compute in turn"
    size = sizes.target.checkpoint_bytes // gpus
    return TargetPlacement(
        Placement.shared,
        copies,
        gpus,
        size,
        f"transformers, {where}",
        in_turn=spread,
        held_bytes=size if sizes.config.capture.mode is CaptureMode.online else 0,
        remedy="Set capture=vllm with vllm.engine_args.tensor_parallel_size, or target.device_map=auto.",
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
    if cluster.gpus_per_node and engines * gpus > free and (by_run or cluster.target_nodes):
        remedy = (
            f"The engines take {engines * gpus} GPUs, and {max(0, free)} have no training process: start "
            f"fewer (--nproc-per-node of torchrun), or start Ray on other nodes and set {RAY_ADDRESS}."
        )
        raise UserError("torchspec.gpus_per_engine", gpus, remedy)
    counts = f"{counted(engines, 'engine')} of {counted(gpus, 'GPU')}"
    where = f"TorchSpec, {counts} ({sizes.config.torchspec.engine.value}) in Ray"
    return TargetPlacement(Placement.apart, engines, gpus, sizes.target.checkpoint_bytes // gpus, where)


def _in_servers(sizes: RunSizes, cluster: Cluster, *, writing: bool = False) -> TargetPlacement:
    """Return where the vLLM servers of a run are, with `vllm.placement=auto` where they work.

    Servers in `vllm.servers`, or on the cluster's target nodes, are apart. Otherwise each node that trains
    has one server. It is split from training where the node shows more GPUs than it has processes: processes
    train on GPUs 0 to n - 1, and the server gets the following ones. Else it shares them: online, vLLM gets
    the fraction of each GPU that the target needs, at most what training leaves; offline it ends before
    training. Engines are repeated, by data parallelism, until a server has all GPUs that it can use, unless
    the recipe sets a data-parallel size.

    Args:
        writing: whether they only write completions: they end before training then, and
            `vllm.placement=auto` has them share all GPUs.
    """
    config, vllm = sizes.config, sizes.config.vllm
    _check_evaluation(config, cluster)
    if vllm.servers or cluster.target_nodes:
        return _apart(sizes, cluster)
    if vllm.placement is Placement.apart:
        remedy = "It needs vllm.servers, or --target-nodes of scripts/submit; or set vllm.placement=auto."
        raise UserError("vllm.placement", "apart", remedy)
    if cluster.gpus_per_node == 0:
        return _on_cpu(sizes, cluster)
    if vllm.placement is Placement.split:
        return _split(sizes, cluster)
    free = cluster.gpus_per_node > cluster.processes_per_node
    if vllm.placement is Placement.auto and free and not writing:
        with suppress(UserError):
            return _split(sizes, cluster)
    return _shared(sizes, cluster, online=config.capture.mode is CaptureMode.online and not writing)


def _apart(sizes: RunSizes, cluster: Cluster) -> TargetPlacement:
    config, vllm = sizes.config, sizes.config.vllm
    parallel = Parallelism.of(vllm.engine_args)
    if vllm.placement in (Placement.shared, Placement.split):
        remedy = "The servers are on other nodes. Set vllm.placement=auto."
        raise UserError("vllm.placement", vllm.placement.value, remedy)
    if vllm.servers:
        for url in vllm.servers:
            if cluster.num_nodes > 1 and is_loopback(urlsplit(url).hostname):
                remedy = "Other nodes of this run cannot reach a loopback address; give the node's address."
                raise UserError("vllm.servers", url, remedy)
        number, gpus = len(vllm.servers), parallel.gpus
        where = f"{counted(number, 'server')} named in vllm.servers, taken to have {gpus} GPUs each"
        return _servers(sizes, Placement.apart, number, parallel, where)
    if cluster.gpus_per_node == 0:
        where = f"{counted(cluster.target_nodes, 'server')} on the CPU"
        return _servers(sizes, Placement.apart, cluster.target_nodes, parallel, where)
    _check_gpus(config, parallel, cluster.gpus_per_node, "on a node")
    _check_alone(sizes, cluster, parallel, _given_utilization(config) or ALONE_FRACTION)
    number = cluster.target_nodes * (cluster.gpus_per_node // parallel.gpus)
    return _on_gpus(sizes, number, Placement.apart, parallel)


def _on_cpu(sizes: RunSizes, cluster: Cluster) -> TargetPlacement:
    if sizes.config.vllm.placement is Placement.split:
        raise UserError("vllm.placement", "split", "There is no GPU to divide. Set vllm.placement=auto.")
    where = f"{counted(cluster.num_nodes, 'server')} on the CPU"
    parallel = Parallelism.of(sizes.config.vllm.engine_args)
    return _servers(sizes, Placement.shared, cluster.num_nodes, parallel, where)


def _split(sizes: RunSizes, cluster: Cluster) -> TargetPlacement:
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
    return _on_gpus(sizes, cluster.num_nodes, Placement.split, parallel, fraction, first)


def _shared(sizes: RunSizes, cluster: Cluster, online: bool) -> TargetPlacement:
    config = sizes.config
    parallel = _filled(config, cluster.gpus_per_node)
    _check_gpus(config, parallel, cluster.gpus_per_node, "on a node")
    given = _given_utilization(config)
    if cluster.gpu_bytes is None:
        fraction = given or (ALONE_FRACTION / 2 if online else ALONE_FRACTION - 0.1)
        return _on_gpus(sizes, cluster.num_nodes, Placement.shared, parallel, fraction)
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
    return _on_gpus(sizes, cluster.num_nodes, Placement.shared, parallel, fraction)


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


def _on_gpus(
    sizes: RunSizes,
    number: int,
    kind: Placement,
    parallel: Parallelism,
    fraction: float | None = None,
    first: int = 0,
) -> TargetPlacement:
    """Return servers on GPUs; those that the run itself starts have a fraction of each, from the first on."""
    where = f"{counted(number, 'server')} of {counted(parallel.gpus, 'GPU')}, {_WHERE[kind]}"
    if fraction is None:
        return _servers(sizes, kind, number, parallel, where)
    engine_args: dict[str, Any] = {"gpu_memory_utilization": fraction}
    if parallel.data > 1 and not parallel.given:
        engine_args["data_parallel_size"] = parallel.data
    where += f"; vLLM takes {fraction:g} of each GPU"
    found = _servers(sizes, kind, number, parallel, where)
    devices = tuple(range(first, first + parallel.gpus))
    return replace(found, devices=devices, memory_fraction=fraction, engine_args=engine_args)


def _servers(
    sizes: RunSizes, kind: Placement, number: int, parallel: Parallelism, where: str
) -> TargetPlacement:
    server = sizes.server(parallel)
    return TargetPlacement(kind, number, parallel.gpus, server.weights, f"vLLM, {where}", server)
