"""A vLLM server that this process starts and that ends with it."""

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from data.capture.vllm.environment import KEY_VARIABLE, LOADER, capture_environment, find_python
from data.progress import FIRST_LINE_SECONDS, LINE_SECONDS, STALL_SECONDS, format_seconds
from data.supervised import Supervised
from eagle31.errors import UserError

_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_FIELD = "vllm"
_LOG_LINES = 20
# Consecutive deaths without an answer between them; more than one prompt can cause. A server that was never
# ready is not started again.
_MAX_IDLE_DEATHS = 5
_POLL_SECONDS, _RESTART_SECONDS, _HEALTH_SECONDS = 0.5, 1.0, 10.0
_WATCH_SECONDS = 30.0  # between prompts that show whether the server hangs


class ServerProcess:
    """A vLLM server. It ends with this process, all its own processes included, however this process ends.

    A server that was ready and dies or hangs is started again, with the same address and key. It hangs where
    it does not answer a prompt of one token within `stall_seconds` and computes no others meanwhile. The
    constructor returns at once; `wait_until_ready` waits.

    Args:
        arguments: vLLM's arguments, from `CaptureEngine.command_line`.
        host: the address that it listens on.
        port: None takes a free one.
        key: what requests must send as a bearer token; None lets everybody in who reaches the server.
        devices: which of the visible GPUs it runs on; None stands for all.
        log: the file that everything vLLM prints is appended to.
        limit_seconds: how long it may take to start.

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
        python = find_python()
        self._log = log
        self._limit_seconds, self._stall_seconds = limit_seconds, stall_seconds
        self._reservation = _reserve(host, port)
        port = self._reservation.getsockname()[1]
        self.url = f"http://{_in_url(host)}:{port}"
        self._client = httpx.Client(
            base_url=f"http://{_in_url(_EVERY_ADDRESS.get(host, host))}:{port}",
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            limits=httpx.Limits(max_keepalive_connections=0),  # none outlives the server
            trust_env=False,
        )
        self._command = [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", *arguments),
            *("--host", host, "--port", str(port)),
            *("--middleware", f"{LOADER.stem}.Gate", "--disable-uvicorn-access-log"),
        ]
        self._environment = _environment(python, key, devices)
        self.num_starts = 0
        self._idle_deaths = 0
        self._was_ready = False
        self._failure: UserError | None = None
        self._closing = threading.Event()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._server = self._start()
        self._watcher = threading.Thread(target=self._watch, name="vllm-server", daemon=True)
        self._watcher.start()

    @property
    def process_id(self) -> int:
        """The process whose group has all processes of the server."""
        return self._server.process_id

    def is_healthy(self) -> bool:
        """Return whether the server answers within some seconds that it takes requests."""
        return self._request("GET", "/health", _HEALTH_SECONDS) is not None

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
            if self._closing.is_set():
                raise self._error("vLLM was closed before it was ready")
            seconds = time.monotonic() - started
            if seconds > self._limit_seconds:
                self.close()
                limit = format_seconds(self._limit_seconds)
                raise self._error(f"vLLM was not ready within {limit}")
            if progress and time.monotonic() > next_line:
                next_line += LINE_SECONDS
                limit = f"{seconds:.0f} s of at most {self._limit_seconds:.0f} s"
                print(f"vLLM: loading, {limit}", file=sys.stderr, flush=True)
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise the UserError that says why the server has ended, if it is not started again."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Return once none of the server's processes exists."""
        self._closing.set()
        self._server.end()
        self._watcher.join()
        self._reservation.close()

    def _start(self) -> Supervised:
        self.num_starts += 1
        with self._log.open("ab") as log:
            return Supervised(self._command, environment=self._environment, log=log)

    def _watch(self) -> None:
        """Start the server again when it dies or hangs, until it is closed or dies too often."""
        while True:
            how = self._follow()
            if how is not None:
                self._server.kill()  # one that hangs would not end when it is asked to
            self._server.end()
            if how is None:
                return
            self._idle_deaths += 1
            if not self._was_ready:
                self._failure = self._error(f"vLLM ended {how} before it was ready")
                return
            if self._idle_deaths >= _MAX_IDLE_DEATHS:
                times = f"{_MAX_IDLE_DEATHS} times in a row without an answer"
                self._failure = self._error(f"vLLM ended {how}, {times}")
                return
            if self._closing.wait(_RESTART_SECONDS):
                return
            self._server = self._start()

    def _follow(self) -> str | None:
        """Return how the server ended or hangs; None where it is to be closed."""
        started, looked = time.monotonic(), 0.0
        is_ready = False
        while not self._closing.wait(_POLL_SECONDS):
            status = self._server.wait(0)
            if status is not None:
                return f"with signal {-status}" if status < 0 else f"with status {status}"
            now = time.monotonic()
            if not is_ready:
                is_ready = self.is_healthy()
                self._was_ready |= is_ready
                # `wait_until_ready` reports that the first start takes too long.
                if self._was_ready and not is_ready and now - started > self._limit_seconds:
                    return f"because it was not ready within {self._limit_seconds:.0f} s"
            elif now - looked > min(_WATCH_SECONDS, self._stall_seconds):
                looked = now
                before = self._metrics()
                # The prompt may wait for many others.
                if self._answers() or self._metrics() not in (None, before):
                    self._idle_deaths = 0
                elif time.monotonic() - now >= self._stall_seconds:
                    return f"because it answered nothing for {self._stall_seconds:.0f} s"
        return None

    def _metrics(self) -> list[bytes] | None:
        """Return vLLM's metrics, which differ after each step of an engine; None without an answer."""
        found = self._request("GET", "/metrics", min(_HEALTH_SECONDS, self._stall_seconds))
        return None if found is None else [one for one in found.splitlines() if one.startswith(b"vllm:")]

    def _answers(self) -> bool:
        """Return whether the server answers a prompt of one token in time.

        It is greedy: on the CPU, a capturing engine of vLLM 0.32 draws the next tokens of all requests in a
        batch at random as soon as one of them is sampled.
        """
        body = {"prompt": [0], "max_tokens": 1, "temperature": 0.0}
        return self._request("POST", "/v1/completions", self._stall_seconds, body) is not None

    def _request(
        self, method: str, path: str, seconds: float, body: dict[str, Any] | None = None
    ) -> bytes | None:
        """Return the answer's content, or None where there is none or it is an error."""
        try:
            answer = self._client.request(method, path, json=body, timeout=seconds)
        except httpx.HTTPError:
            return None
        return answer.content if answer.status_code == 200 else None

    def _error(self, what: str) -> UserError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        remedy = "\n".join([f"{what}:", *(f"  | {line}" for line in lines), f"The full log: {self._log}"])
        return UserError(_FIELD, self.url, remedy)


def _environment(python: Path, key: str | None, devices: Sequence[int] | None) -> dict[str, str]:
    environment = capture_environment(python)
    environment.pop(KEY_VARIABLE, None)
    if key is not None:
        environment[KEY_VARIABLE] = key
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices(devices))
    if not torch.cuda.is_available():
        # The worker then runs in the engine's process: on a CPU vLLM would start another one for it.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def visible_devices(devices: Sequence[int]) -> list[str]:
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
