"""The vLLM servers of a run: those that the recipe names, or one on each node."""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from data.capture.dispatch import PATIENCE_SECONDS
from data.capture.transport.spool import MEMORY
from data.capture.vllm.arguments import CaptureEngine
from data.capture.vllm.client import VllmClient
from data.capture.vllm.environment import KEY_VARIABLE
from data.capture.vllm.server_process import ServerProcess
from data.target.parts import CapturedTarget
from train.config.capture import CaptureConfig
from train.config.run import RunConfig
from train.config.vllm import VllmConfig
from train.distributed import World, made_by_main, node_address, told_by_nodes
from train.plan.target import Parallelism, longest_prompt, target_size

_LOOPBACK = "127.0.0.1"
# A server imports vLLM, reads the weights, at least at the speed of a slow network disk, and compiles.
_START_SECONDS, _LOADED_BYTES_PER_SECOND = 900.0, 0.1e9
# Prompts under way per engine. vLLM batches those that its cache has room for, and the others wait there. On
# a CPU more would wait longer than a client does.
_PROMPTS_ON_GPU, _PROMPTS_ON_CPU = 256, 128


@dataclass(frozen=True)
class ServerSettings:
    """What a node needs to start its server."""

    engine: CaptureEngine
    devices: tuple[int, ...] | None  # the GPUs of the node that the server gets; None: all, or a CPU
    limit_seconds: float  # time to load the target


def server_roots(capture: CaptureConfig, output_dir: Path) -> list[str]:
    """Return the directories below which a server of this run may write."""
    return [str(path.resolve()) for path in (output_dir, Path(capture.spool_dir or MEMORY))]


def server_settings(
    config: RunConfig,
    target: CapturedTarget,
    further_args: Mapping[str, Any] = MappingProxyType({}),
    devices: tuple[int, ...] | None = None,
) -> ServerSettings:
    """Return how a server starts that captures and writes everything that the run needs.

    Args:
        further_args: arguments of the engine in addition to `vllm.engine_args`.
    """
    engine = CaptureEngine(
        target,
        max_tokens=longest_prompt(config),
        roots=server_roots(config.capture, Path(config.output_dir)),
        extra=config.vllm.engine_args | dict(further_args),
    )
    return ServerSettings(engine, devices, load_seconds(config, target))


def load_seconds(config: RunConfig, target: CapturedTarget) -> float:
    """Return how long an engine may take until it has loaded the target."""
    target_bytes = target_size(config.target, target.parts.config).checkpoint_bytes
    return _START_SECONDS + target_bytes / _LOADED_BYTES_PER_SECOND


class RunServers:
    """The servers that the ranks of a run send prompts to.

    Without `vllm.servers`, the first process of each node starts a server, which ends with that process. Its
    address and the key that this run has made for it reach the other ranks through torchrun's store, so the
    key is in no file. Every rank calls `start`, `wait_until_ready` and `close`, in the same order.

    Args:
        settings: returns what a node needs to start a server that captures, or one that does not; not called
            with `vllm.servers`.
        log: the file for the output of this node's server.
    """

    def __init__(
        self,
        vllm: VllmConfig,
        settings: Callable[[bool], ServerSettings],
        world: World,
        log: Path,
    ) -> None:
        self._vllm, self._settings, self._world, self._log = vllm, settings, world, log
        self._process: ServerProcess | None = None
        self._captures: bool | None = None  # whether the servers that run can capture; None: none runs
        self._urls: list[str] = []  # by node, once the servers that this run has started are ready
        self._key: str | None = os.environ.get(KEY_VARIABLE)  # of the servers that the recipe names

    @property
    def named(self) -> bool:
        """Whether the recipe names the servers."""
        return bool(self._vllm.servers)

    @property
    def patience_seconds(self) -> float:
        """How long all servers may be away at once. Those that the run starts again load the target again."""
        return PATIENCE_SECONDS if self.named else max(PATIENCE_SECONDS, self._settings(True).limit_seconds)

    def start(self, captures: bool) -> None:
        """Start the servers, unless suitable ones run already. This does not wait until they are ready.

        Args:
            captures: whether they have to capture hidden states, or only write completions.
        """
        if self.named or self._captures == captures:
            return
        self.close()
        self._captures = captures
        self._key = made_by_main(lambda: secrets.token_urlsafe(32), self._world)
        if self._world.leads_node:
            settings = self._settings(captures)
            engine = settings.engine
            self._process = ServerProcess(
                engine.command_line(captures),
                host=node_address() if self._world.num_nodes > 1 else _LOOPBACK,
                port=None,
                key=self._key,
                devices=settings.devices,
                log=self._log,
                limit_seconds=settings.limit_seconds,
            )

    def wait_until_ready(self) -> None:
        """Wait until the servers of all nodes are ready.

        Raises:
            UserError: one ended, or the time limit is over; with the end of its log.
        """
        if not self._urls:
            url = None
            if self._process is not None:
                self._process.wait_until_ready(progress=self._world.is_main)
                url = self._process.url
            self._urls = told_by_nodes(url, self._world)

    def clients(self, everywhere: bool, senders: int | None = None) -> list[VllmClient]:
        """Return new connections to the servers, once those are ready.

        Args:
            everywhere: whether this process alone sends to all servers. Otherwise every rank sends, to the
                server of its node where the run has started them.
            senders: how many processes of each node send; None for all.
        """
        senders = senders or self._world.ranks_per_node
        if self.named:
            num_sharing = 1 if everywhere else senders * self._world.num_nodes
            return [self._client(url, num_sharing) for url in self._vllm.servers]
        urls = self._urls if everywhere else [self._urls[self._world.node_rank]]
        num_sharing = 1 if everywhere else senders
        return [self._client(url, num_sharing) for url in urls]

    def close(self) -> None:
        """End the server that this process has started."""
        process, self._process = self._process, None
        self._captures, self._urls = None, []
        if process is not None:
            process.close()

    def _client(self, url: str, num_sharing: int) -> VllmClient:
        arguments: Mapping[str, Any] = self._vllm.engine_args
        if self._captures is not None:
            arguments = self._settings(self._captures).engine.extra
        each = _PROMPTS_ON_GPU if torch.cuda.is_available() else _PROMPTS_ON_CPU
        concurrency = each * Parallelism.of(arguments).data
        return VllmClient(url, concurrency, self._key, self._check_process, num_sharing=num_sharing)

    def _check_process(self) -> None:
        """Raise UserError if the server that this process has started will not answer any more."""
        if self._process is not None:
            self._process.check()
