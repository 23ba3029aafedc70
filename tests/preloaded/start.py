"""Interpreters that start at once: a program is run by a fork of a process that has imported its modules.

Most of the time of a short run is spent on imports. Killing such an interpreter kills its program, which runs
in the interpreter's namespaces. A test starts a real one where it looks at a process's memory, threads,
command line or children: among them are tests of torchrun, of train/main.py and of a vLLM server.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

_HERE = Path(__file__).parent
_DIRECTORY, _SESSION = "EAGLE31_TEST_INTERPRETERS", "EAGLE31_TEST_SESSION"
_START_SECONDS = 280
# A fork has only the thread that makes it. PyArrow starts one when it is imported.
PYTHON = sys.executable  # a fixture may replace that
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


def begin_session() -> None:
    """Make the directory of the interpreters, which all workers of the session find."""
    os.environ[_DIRECTORY] = tempfile.mkdtemp(prefix="eagle31-tests-")
    os.environ[_SESSION] = str(os.getpid())


def end_session() -> None:
    """Remove what `begin_session` has made. The servers end with the process that called it."""
    shutil.rmtree(os.environ.pop(_DIRECTORY), ignore_errors=True)


def interpreters() -> Path:
    """Return the directory of the session's interpreters."""
    return Path(os.environ[_DIRECTORY])


def interpreter(name: str, python: str, modules: Sequence[str], environment: dict[str, str]) -> Path:
    """Return the path of an interpreter; the first caller of the session starts its server.

    Args:
        name: the interpreter's directory.
        python: the real interpreter.
        modules: the modules that its programs find imported.
        environment: the environment variables at the time of these imports.
    """
    directory = interpreters() / name
    directory.mkdir(exist_ok=True)
    path = directory / "bin" / "python"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _start(directory, python, modules, environment)
            (directory / "lib").symlink_to(Path(python).parent.parent / "lib")  # where programs look for it
            path.parent.mkdir()
            path.write_text(f"#!{os.path.realpath(PYTHON)} -IS\n{(_HERE / 'client.py').read_text()}")
            path.chmod(0o755)
    return path


def program_of(client: psutil.Process) -> psutil.Process:
    """Return the process that runs the program of an interpreter."""
    [program] = (one for one in psutil.process_iter(["name"]) if one.info["name"] == f"of {client.pid}")
    return program


def _start(directory: Path, python: str, modules: Sequence[str], environment: dict[str, str]) -> None:
    command = [python, "-I", str(_HERE / "server.py"), "socket", os.environ[_SESSION], *modules]
    with (directory / "log").open("w") as log:
        server = subprocess.Popen(
            command,
            cwd=directory,
            env=environment | _NO_THREADS,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    while not (directory / "socket").exists():
        assert server.poll() is None, (directory / "log").read_text()
        assert time.monotonic() < deadline, f"{command} takes too long to start"
        time.sleep(0.05)
