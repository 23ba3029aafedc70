"""Joining a Mooncake store: its package and libraries, its master, and this machine's address there."""

import ctypes
import os
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from data.addresses import outward_address
from data.cache import cache_directory
from eagle31.errors import UserError

REQUIREMENT = "mooncake-transfer-engine-non-cuda>=0.3.13,<0.4"

_CONNECT_SECONDS = 5.0
_LOCAL_BYTES = 64  # of the client's buffer; puts and gets use memory that we register
# Each one needs those before it.
_LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")


@dataclass(frozen=True)
class MooncakeSettings:
    """The settings with which a process joins a Mooncake store."""

    master: str  # HOST:PORT
    metadata: str  # the URL of a metadata server, or P2PHANDSHAKE without one
    segment_bytes: int  # memory that this process lends to the store
    protocol: str = "tcp"  # or rdma
    device: str = ""  # the RDMA device


def load_mooncake() -> Any:
    """Import and return the module `mooncake.store`.

    Raises:
        UserError: the package is not installed, or one of its system libraries is missing.
    """
    # By default it logs every connection, and each attempt to put into a full store.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    for name in _LIBRARIES:
        path = library_directory() / name
        if path.exists():
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    try:
        import mooncake.store
    except ModuleNotFoundError as error:
        remedy = f"This needs Mooncake's Python package: pip install '{REQUIREMENT}'."
        raise UserError("capture.source", "torchspec", remedy) from error
    except ImportError as error:
        remedy = (
            f"Mooncake lacks a system library ({error}): run scripts/setup/mooncake, which needs no root."
        )
        raise UserError("capture.source", "torchspec", remedy) from error
    return mooncake.store


def library_directory() -> Path:
    """Return where scripts/setup/mooncake puts libraries that the system lacks."""
    return cache_directory() / "mooncake-libraries"


def connect(library: Any, settings: MooncakeSettings) -> Any:
    """Return a client of the store that `settings.master` runs."""
    own_address = reach(settings.master)
    store = library.MooncakeDistributedStore()
    code = store.setup(
        own_address,
        settings.metadata,
        settings.segment_bytes,
        _LOCAL_BYTES,
        settings.protocol,
        settings.device,
        settings.master,
    )
    if code != 0:
        remedy = (
            f"Mooncake could not join with protocol={settings.protocol}, "
            f"device={settings.device!r}, {settings.segment_bytes:,} bytes lent (code {code}); see its log."
        )
        raise UserError("torchspec", settings.master, remedy)
    return store


def reach(master: str) -> str:
    """Return the address at which the store's other processes reach this machine.

    Raises:
        UserError: no master answers.
    """
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS) as probe:
            own, masters = probe.getsockname()[0], probe.getpeername()[0]
    except OSError as error:
        remedy = f"The master of TorchSpec's store does not answer there ({error.strerror or error})."
        raise UserError("torchspec", master, remedy) from error
    # Many systems give a machine's name a loopback address, at which other machines do not reach it.
    named = ip_address(masters).is_loopback and host != "localhost" and host != masters
    return (outward_address() or own) if named else own
