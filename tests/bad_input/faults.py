"""Faults of a machine, each for as long as its `with` lasts, and damaged files."""

import contextlib
import ctypes
import http.server
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

_LIBC = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2
_CAPABILITIES_3 = 0x20080522
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2  # let root ignore the modes of files


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Capabilities(ctypes.Structure):
    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    ]


@contextlib.contextmanager
def obeying_modes() -> Iterator[None]:
    """Have the modes of files hold for this thread and those that it starts, also where it is root's.

    Source: capabilities(7), capset(2).
    """
    header, found = _Header(_CAPABILITIES_3, 0), (_Capabilities * 2)()
    _call(_LIBC.capget, ctypes.byref(header), found)
    before = found[0].effective
    found[0].effective = before & ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    _call(_LIBC.capset, ctypes.byref(header), found)
    try:
        yield
    finally:
        found[0].effective = before
        _call(_LIBC.capset, ctypes.byref(header), found)


@contextlib.contextmanager
def protected(directory: Path) -> Iterator[None]:
    """Have a directory that nobody may write to."""
    mode = directory.stat().st_mode
    directory.chmod(0o555)
    try:
        with obeying_modes():
            yield
    finally:
        directory.chmod(mode)


@contextlib.contextmanager
def small_disk(directory: Path, num_bytes: int) -> Iterator[None]:
    """Have a disk of this size at a directory, which is made."""
    if os.geteuid():
        pytest.skip("mounts need root's rights")
    directory.mkdir(parents=True, exist_ok=True)
    size = f"size={num_bytes}".encode()
    _call(_LIBC.mount, b"tmpfs", os.fsencode(directory), b"tmpfs", 0, size)
    try:
        yield
    finally:
        _call(_LIBC.umount2, os.fsencode(directory), _MNT_DETACH)  # even where files are open


@contextlib.contextmanager
def port_in_use() -> Iterator[int]:
    """Yield a port of loopback on which somebody listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def answering(status: int, body: bytes = b"{}") -> Iterator[int]:
    """Yield the port of an HTTP server of somebody else, which has one answer to everything."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _call(function: object, *arguments: object) -> None:
    assert callable(function)
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
