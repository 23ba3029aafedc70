"""What a process is and does. Any of them may end before it is asked: it then does nothing."""

import contextlib

import psutil

EVERY_ADDRESS = {"0.0.0.0", "::"}


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
