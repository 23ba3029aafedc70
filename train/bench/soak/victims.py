"""What the soak kills: the processes that run the target, one after the other."""

import contextlib
import random
import socket
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import psutil

from data.vllm.server_process import is_healthy
from eagle31.errors import UserError
from train.bench.soak.inputs import SoakRuns
from train.bench.soak.processes import Program, kill, kind_of

_SERVE_TARGET = Path(__file__).resolve().parents[3] / "scripts" / "serve_target"
_NUM_SERVERS = 2
_START_SECONDS, _POLL_SECONDS = 900.0, 0.5
_PORTS = range(20000, 30000)


class Victims(Protocol):
    """What runs the target, and can be killed."""

    def kill_next(self) -> str | None:
        """Kill the next process in turn; return its kind, or None where it is not there or not ready yet."""
        ...

    def ready(self) -> bool:
        """Return whether all that was killed runs the target again."""
        ...


class Producers:
    """The processes that run the target in transformers, children of the training."""

    def __init__(self, training: Program) -> None:
        self._training, self._turn = training, 0

    def kill_next(self) -> str | None:
        producers = sorted(self._training.by_kind().get("producers", []), key=lambda one: one.pid)
        if not producers or not kill(producers[self._turn % len(producers)]):
            return None
        self._turn += 1
        return "producer"

    def ready(self) -> bool:
        return True  # a start takes seconds, while the other one works


@dataclass(frozen=True)
class _Killed:
    """A server that was killed and has not answered since."""

    since: float
    api_process: int  # it also ends when its engine was killed, and another one takes its place


class Servers:
    """Two vLLM servers that scripts/serve_target has started, as it does on another machine.

    Attributes:
        urls: their addresses.
        restart_seconds: from each kill until the server answered again.
    """

    def __init__(self, runs: SoakRuns, log: Path) -> None:
        self._ports = _free_ports(_NUM_SERVERS)
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        options = ["--port", str(self._ports[0]), "--servers", str(_NUM_SERVERS)]
        recipe, *settings = runs.serving("vllm")
        command = [sys.executable, str(_SERVE_TARGET), *options, recipe.removeprefix("recipe="), *settings]
        self.program = Program(command, log)
        self.restart_seconds: list[float] = []
        self._turn = 0
        self._killed: dict[int, _Killed] = {}  # by port

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self.ready():
            if not self.program.running or time.monotonic() > deadline:
                raise UserError("--source", "vllm", f"The servers did not start: {self.program.tail}")
            time.sleep(_POLL_SECONDS)

    def kill_next(self) -> str | None:
        """The servers take turns, and of each its engine and the process that answers requests."""
        port = self._ports[self._turn % _NUM_SERVERS]
        server = self._server(port)
        if port in self._killed or server is None:
            return None
        kind = ("engine", "API process")[self._turn // _NUM_SERVERS % 2]
        victim = server if kind == "API process" else _engine_of(server)
        if victim is None or not kill(victim):
            return None
        self._turn += 1
        self._killed[port] = _Killed(time.monotonic(), server.pid)
        return kind

    def ready(self) -> bool:
        for port, killed in list(self._killed.items()):
            server = self._server(port)
            if server is not None and server.pid != killed.api_process and _answers(port):
                self.restart_seconds.append(time.monotonic() - killed.since)
                del self._killed[port]
        return not self._killed and all(map(_answers, self._ports))

    def _server(self, port: int) -> psutil.Process | None:
        """Return the process that answers at a port, or will."""
        for one in self.program.by_kind().get("API processes", []):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = one.cmdline()
                if ["--port", str(port)] in map(list, pairwise(command)):
                    return one
        return None


def _engine_of(server: psutil.Process) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in server.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if kind_of(child) == "engines":
                    return child
    return None


def _answers(port: int) -> bool:
    return is_healthy("127.0.0.1", port, seconds=2.0)


def _free_ports(number: int) -> list[int]:
    """Return consecutive ports that nobody listens on."""
    for first in random.sample(_PORTS, len(_PORTS)):
        ports = list(range(first, first + number))
        with contextlib.suppress(OSError), contextlib.ExitStack() as sockets:
            for port in ports:
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports
    raise UserError("--source", "vllm", f"No {number} consecutive ports of {_PORTS} are free.")
