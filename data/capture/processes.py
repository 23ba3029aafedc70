"""Processes of their own that run the target beside a trainer, started again when they die."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.capture.worker import request_to_json
from data.transport.protocol import StateRequest, Transport
from eagle31.errors import UserError

_ROOT = Path(__file__).resolve().parents[2]
_MAX_IDLE_DEATHS = 3  # one after the other, with nothing delivered in between
_STDERR_LINES = 15
_CLOSE_SECONDS = 10.0
# The worker is no rank of the run, whatever a library makes of these.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ProcessProducer:
    """A `Producer` of worker processes; each request goes to the one that owes the fewest tokens.

    They end with this process, however it ends.

    Args:
        module: runs `data.capture.worker.serve`.
        settings: JSON values for it.
        transport: by which the workers, too, reach what `settings` describes.
    """

    def __init__(
        self, module: str, settings: Mapping[str, Any], transport: Transport, num_processes: int
    ) -> None:
        self.num_restarts = 0
        self._module = module
        self._settings = settings
        self._transport = transport
        self._idle_deaths = 0
        self._workers = [_Worker(module, settings) for _ in range(num_processes)]

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def request(self, request: StateRequest) -> None:
        if any(worker.owes(request.key) for worker in self._workers):
            return  # It is on its way.
        min(self._workers, key=lambda worker: worker.owed_tokens).request(request)

    def refusals(self) -> dict[str, str]:
        refused: dict[str, str] = {}
        for place, worker in enumerate(self._workers):
            if worker.process.poll() is not None:
                self._workers[place] = self._restarted(worker)
            # Of a dead one, what it still said.
            refused |= worker.take_refused()
        return refused

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _restarted(self, dead: "_Worker") -> "_Worker":
        dead.close()
        if dead.failure is not None:
            raise dead.failure
        self._idle_deaths = 0 if dead.num_answers else self._idle_deaths + 1
        if self._idle_deaths >= _MAX_IDLE_DEATHS:
            remedy = (
                f"The process that runs the target ended {self._idle_deaths} times without a single sample, "
                f"with status {dead.process.returncode}; it said: {' | '.join(dead.last_words) or 'nothing'}"
            )
            raise UserError("capture.source", self._module, remedy)
        self.num_restarts += 1
        worker = _Worker(self._module, self._settings)
        for request in dead.owed():
            # What it delivered without having told is there already.
            if not self._transport.arrived(request.key):
                worker.request(request)
        return worker


class _Worker:
    """One process, what it owes, and what it said last."""

    def __init__(self, module: str, settings: Mapping[str, Any]) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        environment = {k: v for k, v in os.environ.items() if k not in _LAUNCHER_VARIABLES}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid())],
            env=environment | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Signals to the trainer's process group are for the trainer to answer.
            start_new_session=True,
        )
        self.num_answers = 0
        self.failure: UserError | None = None
        self.last_words: deque[str] = deque(maxlen=_STDERR_LINES)
        self.owed_tokens = 0
        self._owed: dict[str, StateRequest] = {}
        self._refused: dict[str, str] = {}
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=read, daemon=True) for read in (self._read_answers, self._read_stderr)
        ]
        for thread in self._threads:
            thread.start()
        self._send(settings)

    def owes(self, key: str) -> bool:
        with self._lock:
            return key in self._owed

    def owed(self) -> list[StateRequest]:
        with self._lock:
            return list(self._owed.values())

    def request(self, request: StateRequest) -> None:
        with self._lock:
            self._owed[request.key] = request
            self.owed_tokens += len(request.input_ids)
        self._send(request_to_json(request))

    def take_refused(self) -> dict[str, str]:
        with self._lock:
            refused, self._refused = self._refused, {}
        return refused

    def close(self) -> None:
        """Ends the process, where it still runs, and reads what it said to the end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _send(self, content: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(content).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # It is dead, and is started again with what it owed.

    def _read_answers(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                if line.endswith(b"\n"):  # else it died in the middle
                    self._note(json.loads(line))

    def _note(self, answer: dict[str, Any]) -> None:
        if "failed" in answer:
            field, value, remedy = answer["failed"]
            self.failure = UserError(field, value, remedy)
            return
        with self._lock:
            self.num_answers += 1
            key = answer["done"] if "done" in answer else answer["refused"]
            request = self._owed.pop(key, None)
            if request is not None:  # else asked for twice
                self.owed_tokens -= len(request.input_ids)
            if "refused" in answer:
                self._refused[key] = answer["reason"]

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.last_words.append(line.decode(errors="replace").rstrip())
