"""What a process is and does. Any of them may end before it is asked: it then does nothing."""

import contextlib
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

import psutil

EVERY_ADDRESS = {"0.0.0.0", "::"}
WAIT_SECONDS = 1000.0


def wait_for(
    condition: Callable[[], object], pause: float = 0.05, explain: Callable[[], str] = lambda: ""
) -> None:
    """Return once a condition holds; fail after a quarter of an hour with an explanation."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(pause)


def free_ports(number: int) -> list[int]:
    """Return ports of loopback on which nobody listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in sockets]


def command_of(process: psutil.Process) -> list[str]:
    """Return its name and its command line."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return [process.name(), *process.cmdline()]
    return []


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment that it was started with."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.environ()
    return {}


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """Return the addresses and ports on which it listens."""
    with contextlib.suppress(psutil.NoSuchProcess):
        sockets = process.net_connections("tcp")
        return [(one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN]
    return []
