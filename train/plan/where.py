"""Where the target captures: in transformers, in vLLM's servers, or in TorchSpec's engines."""

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from data.addresses import is_loopback
from data.capture.transport.spool import MEMORY
from data.capture.vllm.arguments import check_final_states
from eagle31.errors import UserError
from train.config.capture import CaptureMode, CaptureSource, TransportKind
from train.config.run import uses_vllm
from train.config.vllm import Placement
from train.plan.placement import Cluster, ServerPlacement, place_servers
from train.plan.sizes import RunSizes
from train.plan.target import Parallelism

_PORT, _RAY_PORT = 8000, 6379
_RAY_ADDRESS = "RAY_ADDRESS"  # Ray's own variable


@dataclass(frozen=True)
class TargetGpus:
    """The GPUs that run the target during capture."""

    num_replicas: int
    gpus_per_replica: int
    bytes_per_gpu: int  # of weights; the key-value cache and activations need more
    where: str  # in words
    beside_training: bool = False  # whether it captures while the drafter is trained, on other GPUs
    held_bytes: int = 0  # of each GPU that trains, while it trains
    remedy: str = ""  # where bytes_per_gpu do not fit; empty: that has been checked
    in_turn: bool = False  # whether the GPUs of a replica compute one after the other

    @property
    def num_at_work(self) -> int:
        """The GPUs that compute at the same time."""
        return max(1, self.num_replicas * (1 if self.in_turn else self.gpus_per_replica))


@dataclass(frozen=True)
class Command:
    """A command and the nodes on which it is typed."""

    where: str
    line: str


@dataclass(frozen=True)
class TargetStart:
    """How the target is started on nodes of its own."""

    commands: list[Command] = field(default_factory=list)
    environment: str = ""  # of the command that trains, before it
    arguments: list[str] = field(default_factory=list)  # of the command that trains
    submit: list[str] = field(default_factory=list)  # options of scripts/submit


class WhereTargetRuns(ABC):
    """Where the target captures, and what the plan, the commands and the run's start have from it.

    There is one class for each capture.source.
    """

    num_nodes: Sequence[int] = (1,)  # that stages=[plan] plans for where the user says nothing
    in_slurm = True  # whether a job of scripts/submit starts it

    def __init__(self, sizes: RunSizes) -> None:
        self.sizes, self.config = sizes, sizes.config

    @property
    def online(self) -> bool:
        return self.config.capture.mode is CaptureMode.online

    @property
    def waiting_bytes(self) -> int:
        """The most bytes of states that wait between the target and the run on a node."""
        return int(self.config.capture.spool_gb * 1e9)

    @property
    def spool_dir(self) -> Path | None:
        """The directory in which they wait as files."""
        return None

    def divided(self, num_nodes: int, gpus: int, gpu_bytes: int | None) -> Cluster:
        """Return how nodes with so many GPUs are divided between training and the target."""
        return Cluster(num_nodes, gpus, gpus, gpu_bytes)

    def writers(self, cluster: Cluster) -> ServerPlacement | None:
        """Return where the run's vLLM servers are that only write completions; None without any.

        Raises:
            UserError: the run cannot be placed on this cluster.
        """
        if not uses_vllm(self.config):
            return None
        return place_servers(self.sizes, replace(cluster, target_nodes=0), writing=True)

    def servers(self, cluster: Cluster) -> ServerPlacement | None:
        """Return where the run's other vLLM servers are, as `writers`. Here none captures."""
        return self.writers(cluster)

    @abstractmethod
    def gpus(self, cluster: Cluster, servers: ServerPlacement | None) -> TargetGpus:
        """Return the GPUs that run the target, from what `servers` returns."""

    def start(self, cluster: Cluster, servers: ServerPlacement | None, given: Sequence[str]) -> TargetStart:
        """Return how the target is started; `given` are the user's settings."""
        return TargetStart()


class InTransformers(WhereTargetRuns):
    """In the run's own processes."""

    waiting_bytes = 0

    def divided(self, num_nodes: int, gpus: int, gpu_bytes: int | None) -> Cluster:
        return Cluster(num_nodes, gpus, gpus if self.config.target.device_map is None else 1, gpu_bytes)

    def servers(self, cluster: Cluster) -> ServerPlacement | None:
        processes, device_map = cluster.processes_per_node, self.config.target.device_map
        if device_map is not None and processes > 1:
            remedy = f"Each of a node's {processes} processes would spread a copy: start one on each node."
            raise UserError("target.device_map", device_map, remedy)
        return super().servers(cluster)

    def gpus(self, cluster: Cluster, servers: ServerPlacement | None) -> TargetGpus:
        replicas, gpus, where = cluster.num_ranks, 1, "a copy in every process"
        spread = self.config.target.device_map is not None
        if spread:
            replicas, gpus = cluster.num_nodes, max(1, cluster.gpus_per_node)
            where = f"spread over the {gpus} GPUs of a node, which compute in turn"
        size = self.sizes.target.checkpoint_bytes // gpus
        remedy = "Set capture=vllm with vllm.engine_args.tensor_parallel_size, or target.device_map=auto."
        held = size if self.online else 0
        return TargetGpus(
            replicas, gpus, size, f"transformers, {where}", held_bytes=held, remedy=remedy, in_turn=spread
        )


class InServers(WhereTargetRuns):
    """In vLLM's servers: the given ones, or those that the run starts."""

    def __init__(self, sizes: RunSizes) -> None:
        super().__init__(sizes)
        self.parallel = Parallelism.of(self.config.vllm.engine_args)
        self.given = bool(self.config.vllm.servers)
        self.num_nodes, self.in_slurm = (1,) if self.given else (1, 2), not self.given

    @property
    def spool_dir(self) -> Path | None:
        """None over Mooncake.

        Servers that the run starts are on the nodes of their ranks, and so is a server under a loopback
        address: their states wait in memory. Other servers and the ranks share the output directory.
        """
        capture, servers = self.config.capture, self.config.vllm.servers
        if capture.transport is TransportKind.mooncake:
            return None
        if capture.spool_dir is not None:
            return Path(capture.spool_dir).absolute()
        beside = all(is_loopback(urlsplit(url).hostname) for url in servers)
        return MEMORY if beside else Path(self.config.output_dir).absolute() / "spool"

    def divided(self, num_nodes: int, gpus: int, gpu_bytes: int | None) -> Cluster:
        placement, processes = self.config.vllm.placement, gpus
        if placement is Placement.split:
            processes = max(1, gpus - self.parallel.gpus)
        apart = placement is Placement.auto and self.online and not self.given
        targets = num_nodes // 2 if apart or placement is Placement.apart else 0
        return Cluster(num_nodes - targets, gpus, processes, gpu_bytes, targets)

    def writers(self, cluster: Cluster) -> ServerPlacement:
        return place_servers(self.sizes, cluster, writing=True)

    def servers(self, cluster: Cluster) -> ServerPlacement:
        check_final_states(self.sizes.target_config)
        return place_servers(self.sizes, cluster)

    def gpus(self, cluster: Cluster, servers: ServerPlacement | None) -> TargetGpus:
        assert servers is not None
        gpus, number = servers.gpus or self.parallel.gpus, _counted(servers.num_servers, "server")
        where = {
            Placement.shared: "shared with training",
            Placement.split: "split from training",
            Placement.apart: "on nodes of their own",
        }[servers.kind]
        where = f"{number} of {_counted(gpus, 'GPU')}, {where}"
        if cluster.gpus_per_node == 0:
            where = f"{number} on the CPU"
        if self.given:
            where = f"{number} named in vllm.servers, taken to have {gpus} GPUs each"
        if servers.memory_fraction is not None:
            where += f"; vLLM takes {servers.memory_fraction:g} of each GPU"
        weights = self.sizes.server(servers.parallel(self.config)).weights
        beside = self.online and servers.kind is not Placement.shared
        return TargetGpus(servers.num_servers, gpus, weights, f"vLLM, {where}", beside)

    def start(self, cluster: Cluster, servers: ServerPlacement | None, given: Sequence[str]) -> TargetStart:
        if not cluster.target_nodes:
            return TargetStart()
        assert servers is not None
        assert servers.kind is Placement.apart
        per_node = servers.num_servers // cluster.target_nodes
        nodes = [f"TARGET{index + 1}" for index in range(cluster.target_nodes)]
        urls = [f"http://{node}:{_PORT + index}" for node in nodes for index in range(per_node)]
        serve = ["scripts/serve_target", f"recipe={self.config.recipe_name}", *given, "--host", "0.0.0.0"]
        submit = ["--target-nodes", str(cluster.target_nodes)]
        if per_node > 1:
            serve += ["--servers", str(per_node)]
            submit += ["--servers-per-node", str(per_node)]
        command = Command(" and ".join(nodes), shlex.join(serve))
        return TargetStart([command], "", [f"vllm.servers=[{','.join(urls)}]"], submit)


class InTorchSpec(WhereTargetRuns):
    """In TorchSpec's engines, which Ray places on the GPUs that it has."""

    num_nodes = (1, 2)
    in_slurm = False

    @property
    def _num_gpus(self) -> int:
        return self.config.torchspec.num_engines * self.config.torchspec.gpus_per_engine

    def divided(self, num_nodes: int, gpus: int, gpu_bytes: int | None) -> Cluster:
        targets = num_nodes // 2
        free = gpus if targets else max(1, gpus - self._num_gpus)
        train = self.config.train
        groups = free // train.row_ranks
        groups = next((count for count in range(groups, 0, -1) if train.rows_per_step % count == 0), 1)
        processes = groups * train.row_ranks
        return Cluster(num_nodes - targets, gpus, processes, gpu_bytes, targets)

    def servers(self, cluster: Cluster) -> ServerPlacement | None:
        """Check that the engines have GPUs: those of nodes that do not train, or of the only node.

        A run on one node starts Ray itself, for the GPUs that no process trains on.
        """
        if not (cluster.target_nodes or os.environ.get(_RAY_ADDRESS)):
            if cluster.num_nodes > 1:
                remedy = (
                    "With several nodes, start Ray on each of them and set it: `stages=[plan]` prints how."
                )
                raise UserError(_RAY_ADDRESS, "", remedy)
            self._check_free(cluster.gpus_per_node - cluster.processes_per_node, cluster)
        elif cluster.target_nodes:
            self._check_free(cluster.target_nodes * cluster.gpus_per_node, cluster)
        return super().servers(cluster)

    def _check_free(self, free: int, cluster: Cluster) -> None:
        if cluster.gpus_per_node and self._num_gpus > free:
            remedy = (
                f"The engines take {self._num_gpus} GPUs, and {max(0, free)} have no training process: start "
                f"fewer (--nproc-per-node of torchrun), or start Ray on other nodes and set {_RAY_ADDRESS}."
            )
            raise UserError("torchspec.gpus_per_engine", self.config.torchspec.gpus_per_engine, remedy)

    def gpus(self, cluster: Cluster, servers: ServerPlacement | None) -> TargetGpus:
        torchspec = self.config.torchspec
        engines, gpus = torchspec.num_engines, torchspec.gpus_per_engine
        counts = f"{_counted(engines, 'engine')} of {_counted(gpus, 'GPU')} ({torchspec.engine.value}) in Ray"
        size = self.sizes.target.checkpoint_bytes // gpus
        return TargetGpus(engines, gpus, size, f"TorchSpec, {counts}", self.online)

    def start(self, cluster: Cluster, servers: ServerPlacement | None, given: Sequence[str]) -> TargetStart:
        if not cluster.target_nodes:
            return TargetStart()
        head, gpus = f"TARGET1:{_RAY_PORT}", f"--num-gpus={cluster.gpus_per_node}"
        found = [Command("TARGET1", f"ray start --head --port={_RAY_PORT} {gpus}")]
        if cluster.target_nodes > 1:
            others = f"each of TARGET2 to TARGET{cluster.target_nodes}"
            found.append(Command(others, f"ray start --address={head} {gpus}"))
        # The GPUs that train are not Ray's.
        found.append(Command(training_nodes(cluster), f"ray start --address={head} --num-gpus=0"))
        return TargetStart(found, f"{_RAY_ADDRESS}={head} ")


_PLACES: dict[CaptureSource, type[WhereTargetRuns]] = {
    CaptureSource.hf: InTransformers,
    CaptureSource.vllm: InServers,
    CaptureSource.torchspec: InTorchSpec,
}


def where_target_runs(sizes: RunSizes) -> WhereTargetRuns:
    """Return where the run's target captures."""
    return _PLACES[sizes.config.capture.source](sizes)


def training_nodes(cluster: Cluster) -> str:
    """Return the placeholders for the names of the nodes that train."""
    return "TRAIN1" if cluster.num_nodes == 1 else f"each of TRAIN1 to TRAIN{cluster.num_nodes}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"
