"""Commands whose processes all end when the process that started them ends, however that ends.

    supervised.py PARENT COMMAND...

runs a command in a separate process group and writes its exit status to stdout. When stdin or the parent
ends, the command gets a SIGTERM and some seconds; then every process of the group is killed. It is run by
location and uses the standard library only.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# A child is no rank of the run, whatever a library makes of these variables.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.2
_END_SECONDS = 10.0


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that a launcher such as torchrun sets for a rank."""
    return {name: value for name, value in environment.items() if name not in _LAUNCHER_VARIABLES}


class Supervised:
    """A running command; its stdout and stderr go to `log`."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str],
        log: IO[bytes],
        directory: Path | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            cwd=directory,
            # Signals to this process's group, such as Ctrl-C, are for this process to handle.
            start_new_session=True,
        )

    @property
    def process_id(self) -> int:
        """The process between this one and the command; the command's processes are in its group."""
        return self._process.pid

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the command's exit status once no process of it is left; None after `seconds`.

        It is the negative number of the signal that ended the command, or the supervisor with it.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            self.kill()
            assert self._process.stdout is not None
            status = self._process.stdout.read()
            return int(status) if status else -signal.SIGKILL
        return None

    def end(self) -> None:
        """End the command and return once no process of it is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self.kill()

    def kill(self) -> None:
        """Kill every process of the command at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def run_supervised(
    command: Sequence[str | Path], *, environment: Mapping[str, str], directory: Path, log: IO[bytes]
) -> int:
    """Run a command to its end and return its exit status; see `Supervised`."""
    running = Supervised(command, environment=environment, log=log, directory=directory)
    try:
        status = running.wait()
        assert status is not None
        return status
    finally:
        running.end()


def _supervise(parent: int, command: Sequence[str]) -> None:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
    while process.poll() is None:
        ended = select.select([sys.stdin], [], [], _POLL_SECONDS)[0]
        if ended or os.getppid() != parent:
            process.terminate()
            deadline = time.monotonic() + _END_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS / 10)
            break
    if process.poll() is not None:
        with contextlib.suppress(BrokenPipeError):  # the parent may have ended
            os.write(sys.stdout.fileno(), str(process.returncode).encode())
    os.killpg(0, signal.SIGKILL)  # with this process


if __name__ == "__main__":
    _supervise(int(sys.argv[1]), sys.argv[2:])
