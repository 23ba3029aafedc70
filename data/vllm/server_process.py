"""A vLLM server that this process starts and that ends with it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from data.progress import FIRST_LINE_SECONDS, LINE_SECONDS, STALL_SECONDS, format_seconds
from data.vllm.environment import KEY_VARIABLE, LOADER, ROOT, capture_environment, find_python
from eagle31.errors import UserError

_SUPERVISOR = ROOT / "data" / "processes" / "supervisor.py"
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_FIELD = "vllm"
_LOG_LINES = 20
# Consecutive deaths without a completion between them. A server that was never ready is not started again.
_MAX_IDLE_DEATHS = 3
_POLL_SECONDS = 0.5
_RESTART_SECONDS, _REPORT_SECONDS = 1.0, 30.0
_WRITE_SECONDS = 45  # less than the supervisor gives it


class ServerProcess:
    """A vLLM server. It ends with this process, all its own processes included, however this process ends.

    A server that was ready and dies or hangs is started again, with the same address and key. The constructor
    returns at once; `wait_until_ready` waits.

    Args:
        arguments: vLLM's arguments, from `CaptureEngine.command_line` or `answer_command_line`.
        host: the address that it listens on.
        port: None takes a free one.
        key: what requests must send as a bearer token; None lets everybody in who reaches the server.
        devices: which of the visible GPUs it runs on; None stands for all.
        log: the file that everything vLLM prints is appended to.
        limit_seconds: how long it may take to start.
        stall_seconds: the longest time without progress; then it counts as hung, and is started again.

    Raises:
        UserError: it cannot listen there, or vLLM's environment does not exist.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        host: str,
        port: int | None,
        key: str | None,
        devices: Sequence[int] | None,
        log: Path,
        limit_seconds: float,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._python = find_python()
        self._host, self._log, self._limit_seconds = host, log, limit_seconds
        self._stall_seconds = stall_seconds
        self._reservation = _reserve(host, port)
        self._port: int = self._reservation.getsockname()[1]
        self.url = f"http://{_in_url(host)}:{self._port}"
        self._arguments = list(arguments)
        self._environment = _environment(self._python, key, devices)
        self.num_starts = 0
        self._was_ready = False
        self._closing = False
        self._idle_deaths = 0
        self._failure: UserError | None = None
        self._changes = threading.Lock()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process_id: int | None = None
        self._supervisor = self._start()
        self._watcher = threading.Thread(target=self._watch, name="vllm-server", daemon=True)
        self._watcher.start()

    @property
    def process_id(self) -> int | None:
        """The process of vLLM's HTTP server, or None while it starts."""
        return self._process_id

    def is_healthy(self, seconds: float = 10.0) -> bool:
        """Return whether the server answers within some seconds that it takes requests."""
        return is_healthy(_EVERY_ADDRESS.get(self._host, self._host), self._port, seconds)

    def wait_until_ready(self, progress: bool) -> None:
        """Return once the server takes requests.

        Args:
            progress: print a line now and then.

        Raises:
            UserError: it ended, or has not become ready in time; with the end of its log.
        """
        started = time.monotonic()
        next_line = started + FIRST_LINE_SECONDS
        while not self.is_healthy():
            self.check()
            if self._closing:
                raise self._error("vLLM was closed before it was ready")
            seconds = time.monotonic() - started
            if seconds > self._limit_seconds:
                self.close()
                limit = format_seconds(self._limit_seconds)
                raise self._error(f"vLLM was not ready within {limit}; vllm.start_minutes sets the limit")
            if progress and time.monotonic() > next_line:
                next_line += LINE_SECONDS
                limit = f"{seconds:.0f} s of at most {self._limit_seconds:.0f} s"
                print(f"vLLM: loading, {limit}", file=sys.stderr, flush=True)
            time.sleep(_POLL_SECONDS)
        self._was_ready = True

    def check(self) -> None:
        """Raise the UserError that says why the server has ended, if it is not started again."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Return once the server has written what it captured, and none of its processes exists."""
        with self._changes:
            self._closing = True
            supervisor = self._supervisor
        assert supervisor.stdin is not None
        # It may have ended, or have been closed before.
        with contextlib.suppress(BrokenPipeError, ValueError):
            supervisor.stdin.write(b"c")
            supervisor.stdin.close()
        self._watcher.join()
        self._reservation.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        self.num_starts += 1
        command = [
            *(str(self._python), "-m", "vllm.entrypoints.openai.api_server", *self._arguments),
            *("--host", self._host, "--port", str(self._port)),
            *("--middleware", f"{LOADER.stem}.Gate", "--disable-uvicorn-access-log"),
            # Without it, vLLM kills the engine, which may have states to write.
            *("--shutdown-timeout", str(_WRITE_SECONDS)),
        ]
        address = f"{_in_url(_EVERY_ADDRESS.get(self._host, self._host))}:{self._port}"
        # At its first start, `wait_until_ready` reports that it takes too long.
        start_seconds = self._limit_seconds + _REPORT_SECONDS
        limits = [address, str(start_seconds), str(self._stall_seconds)]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), *limits, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                # Signals to this process's group, such as Ctrl-C, are for this process to handle.
                start_new_session=True,
            )

    def _watch(self) -> None:
        """Start the server again when it dies, until it is closed or dies too often."""
        while True:
            how = self._follow(self._supervisor)
            with self._changes:
                if self._closing:
                    return
                self._idle_deaths += 1
                if not self._was_ready:
                    self._failure = self._error(f"vLLM ended {how} before it was ready")
                    return
                if self._idle_deaths >= _MAX_IDLE_DEATHS:
                    times = f"{_MAX_IDLE_DEATHS} times in a row without a completion"
                    self._failure = self._error(f"vLLM ended {how}, {times}")
                    return
            time.sleep(_RESTART_SECONDS)
            with self._changes:
                if self._closing:
                    return
                self._supervisor = self._start()

    def _follow(self, supervisor: "subprocess.Popen[bytes]") -> str:
        """Return how the server ended, once no process of it is left."""
        assert supervisor.stdout is not None
        assert supervisor.stdin is not None
        how = None
        with supervisor.stdout as reports:
            for line in reports:
                report = json.loads(line)
                self._process_id = report.get("server", self._process_id)
                how = report.get("ended", how)
                if "answered" in report:
                    self._was_ready, self._idle_deaths = True, 0
        self._process_id = None
        supervisor.wait()
        if how is None:
            # Somebody killed the supervisor. What it would have ended is in its group.
            _kill_group(supervisor.pid)
            how = "with its supervisor"
        return how

    def _error(self, what: str) -> UserError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        remedy = "\n".join([f"{what}:", *(f"  | {line}" for line in lines), f"The full log: {self._log}"])
        return UserError(_FIELD, self.url, remedy)


def is_healthy(host: str, port: int, seconds: float) -> bool:
    """Return whether a vLLM server answers within some seconds that it takes requests."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _environment(python: Path, key: str | None, devices: Sequence[int] | None) -> dict[str, str]:
    environment = capture_environment(python)
    environment.pop(KEY_VARIABLE, None)
    if key is not None:
        environment[KEY_VARIABLE] = key
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(devices))
    if not torch.cuda.is_available():
        # The worker then runs in the engine's process: on a CPU vLLM would start another one for it.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def _visible(devices: Sequence[int]) -> list[str]:
    """Return how CUDA names some of this process's visible GPUs."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return [str(device) for device in devices]
    visible = names.split(",")
    return [visible[device] for device in devices]


def _reserve(host: str, port: int | None) -> socket.socket:
    """Return a socket that keeps the port from other programs while vLLM is not listening on it.

    Linux lets a second socket bind the same port while none listens, if both say that they reuse addresses,
    which vLLM's does.
    """
    reservation = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind((host, port or 0))
    except OSError as error:
        reservation.close()
        remedy = (
            f"A vLLM server cannot listen there: {error.strerror or error}; choose another address or port."
        )
        raise UserError(_FIELD, f"{_in_url(host)}:{port}", remedy) from error
    return reservation


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _kill_group(process_group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_group, signal.SIGKILL)
