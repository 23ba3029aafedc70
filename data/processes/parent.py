"""The parent's side of a process that JSON lines drive; `child.py` is the other side."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.processes.child import Message

_LOG_LINES = 15
_ROOT = Path(__file__).resolve().parents[2]
# `python -m` would look in the working directory first, which may hold a module that is called `data`, too.
_RUN = "import runpy, sys; sys.path[0] = sys.argv[1]; runpy.run_module(sys.argv[2], run_name='__main__')"
_JOIN_SECONDS = 10.0
# A child is no rank of the run, whatever a library makes of these variables.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that a launcher such as torchrun sets for a rank."""
    return {name: value for name, value in environment.items() if name not in _LAUNCHER_VARIABLES}


def end_group(process_group: int) -> None:
    """Kill every process of a group, if there is one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_group, signal.SIGKILL)


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of this project in another process of this Python."""
    return [sys.executable, "-c", _RUN, str(_ROOT), module]


class ChildProcess:
    """A running child. It ends with this process, however this process ends.

    Args:
        settings: JSON values that the child gets first.
        environment: all of the child's environment variables.
        began: called in a thread once the child is ready.
        answered: called in the same thread with each answer.
        ended: called in the same thread after the last answer, when the child has ended.
        log: the file that the child's stderr is appended to. Without one its last lines are kept in memory.
        directory: the child's working directory.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        settings: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        began: Callable[[], None] = lambda: None,
        answered: Callable[[Message], None],
        ended: Callable[[], None] = lambda: None,
        log: Path | None = None,
        directory: Path | None = None,
    ) -> None:
        self.ready: Message | None = None  # what the child reported once it was set up
        self.failure: Any = None  # why it ended, where it knew
        self._answered, self._ended, self._log = answered, ended, log
        self._report_ready = began
        self._last_lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._began = threading.Event()
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.nullcontext() if log is None else log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if file is None else file,
                cwd=directory,
                env=environment,
                # Signals to this process's group are for this process to handle.
                start_new_session=True,
            )
        # A thread writes: `send` never waits for a child that is busy.
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.send({"parent": os.getpid(), "settings": dict(settings)})
        targets = [self._write, self._read, *([self._read_stderr] if log is None else [])]
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_description(self) -> str:
        """How the child ended, as "signal 9" or "status 1"."""
        status = self._process.returncode
        return f"signal {-status}" if status is not None and status < 0 else f"status {status}"

    def send(self, message: Message) -> None:
        """Send a request. A dead child loses it."""
        self._outgoing.put(message)

    def wait_until_ready(self, timeout: float) -> bool:
        """Wait until the child is ready or has ended; return whether it is ready."""
        self._began.wait(timeout)
        return self.ready is not None

    def log_tail(self, num_lines: int = _LOG_LINES) -> list[str]:
        """Return the last lines that the child and its libraries printed."""
        if self._log is None:
            return list(self._last_lines)
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]

    def end_requests(self) -> None:
        """Close the child's stdin after what was sent. The child is to finish and end."""
        self._outgoing.put(None)

    def kill(self) -> None:
        """End the child and all processes of its group at once, also one that is stopped."""
        end_group(self._process.pid)

    def close(self, seconds: float) -> None:
        """End the child, by force after `seconds`, and read its answers to the end."""
        self.end_requests()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        end_group(self._process.pid)  # what the child has started and left, which may hold its pipes
        self.join()

    def join(self) -> None:
        """Wait for the threads of a child that has ended."""
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _write(self) -> None:
        assert self._process.stdin is not None
        # A dead child is noticed by whoever reads; what it was sent is lost.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            while (message := self._outgoing.get()) is not None:
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                if not line.endswith(b"\n"):
                    break  # The child died in the middle of an answer.
                self._note(json.loads(line))
        self._process.wait()
        end_group(self._process.pid)
        self._outgoing.put(None)
        self._began.set()
        self._ended()

    def _note(self, message: Message) -> None:
        if "ready" in message:
            self.ready = message["ready"]
            self._began.set()
            self._report_ready()
        elif "failed" in message:
            self.failure = message["failed"]
        else:
            self._answered(message)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            for line in stderr:
                self._last_lines.append(line.decode(errors="replace").rstrip())
