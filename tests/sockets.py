"""The sockets on which a process listens."""

import psutil

EVERY_ADDRESS = {"0.0.0.0", "::"}


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """Return the addresses and ports on which a process listens."""
    sockets = process.net_connections("tcp")
    return [(one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN]
