"""Run Python programs in forks of one process that has already imported what they need.

    python server.py SOCKET WATCHED_PROCESS MODULE...

The programs come from `client.py`. The server ends when the watched process ends. This file uses the standard
library only, because it runs in several environments.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.spawn
import os
import platform
import runpy
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
_FLAGS = ("-u", "-I", "-P")
_MAX_DESCRIPTORS, _FIRST_FREE = 64, 500  # passed by a client; above those that it can pass
_NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")  # the last one hides those of other processes


def serve(path: str, watched: int) -> dict[str, Any]:
    """Accept programs while the watched process lives. Only a fork that is to run one returns, with it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the guards' exit statuses are nobody's
    end = os.pidfd_open(watched)
    sources: list[Any] = [listener, end]
    while end not in select.select(sources, [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(end)
            return guard(connection)
        connection.close()
    os.unlink(path)
    os._exit(0)


def guard(connection: socket.socket) -> dict[str, Any]:
    """Fork the program, and report its exit status to the client; kill it when the client ends before it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, _MAX_DESCRIPTORS)
    request: dict[str, Any] = json.loads(message)
    try:
        enter_namespaces_of(connection)
    except FileNotFoundError:
        os._exit(0)  # the client has ended
    process = os.fork()
    if process == 0:
        with contextlib.suppress(ConnectionError):
            connection.send(b"%d" % os.getpid())  # in the client's namespace, unlike `process`
        connection.close()
        take_over(request["descriptors"], descriptors)
        return request
    for number in (0, 1, 2, *descriptors):
        os.close(number)
    os.setsid()
    end = os.pidfd_open(process)
    sources: list[Any] = [connection, end]
    if end not in select.select(sources, [], [])[0]:
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(ConnectionError):
        connection.send(b"%d" % status)
    os._exit(0)


def enter_namespaces_of(connection: socket.socket) -> None:
    """Enter those namespaces of the client that are not this process's; its program then starts in them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    client = Path(f"/proc/{struct.unpack('3i', credentials)[0]}/ns")
    with contextlib.ExitStack() as stack:
        descriptors = [
            stack.enter_context((client / name).open())
            for name in _NAMESPACES
            if os.readlink(client / name) != os.readlink(f"/proc/self/ns/{name}")
        ]
        libc = ctypes.CDLL(None, use_errno=True)
        for descriptor in descriptors:
            if libc.setns(descriptor.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")


def take_over(numbers: Sequence[int], received: Sequence[int]) -> None:
    """Give the descriptors that a client has sent the numbers that they have there."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_FREE) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def run(request: dict[str, Any], base: list[str]) -> None:
    """Run a program as a Python that is started with this command line would.

    Args:
        base: the import path of a Python without a program.
    """
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.setsid()
    client = request["process"]
    Path("/proc/self/comm").write_text(f"of {client}")
    os.getppid = lambda: _parent_of(client)
    platform._uname_cache = None  # type: ignore[attr-defined]  # the client may have another host name
    arguments = request["arguments"]
    flags = set()
    while arguments[0] in _FLAGS:
        flags.add(arguments.pop(0))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    if "-u" in flags or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    isolated = "-I" in flags
    extra = [] if isolated else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, extra), *base]
    importlib.invalidate_caches()
    safe = isolated or "-P" in flags or bool(os.environ.get("PYTHONSAFEPATH"))
    # The processes that it starts are forks, too.
    sys.executable = request["executable"]
    multiprocessing.spawn.set_executable(request["executable"])
    if arguments[0] == "-m":
        if not safe:
            sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)  # or runpy warns
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        if not safe:
            sys.path.insert(0, "")
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    elif arguments[0].startswith("-"):
        raise SystemExit(f"{__file__} does not know the option {arguments[0]}")
    else:
        if not safe:
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def leave(request: dict[str, Any], base: list[str]) -> NoReturn:
    """Run a program and exit with its status. The modules are not freed one by one, which takes a second."""
    status = 0
    try:
        run(request, base)
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def _parent_of(process: int) -> int:
    """Return the parent of the client, which stands for this process; 1 when it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


if __name__ == "__main__":
    socket_path, watched_process, *modules = sys.argv[1:]
    base_path = list(sys.path)
    sys.path.insert(0, str(ROOT))
    for module in modules:
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"A fork would lack {len(threads) - 1} threads of this process."
    gc.collect()
    gc.freeze()  # the garbage collector of a fork then leaves the shared memory alone
    # vLLM calls both for each engine, and would then visit all that was imported.
    gc.freeze = gc.unfreeze = lambda: None
    leave(serve(socket_path, int(watched_process)), base_path)
