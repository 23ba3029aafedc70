"""Processes that run the target next to a trainer, and are started again when they die or hang."""

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from data.capture.worker import request_to_json
from data.processes.child import Message
from data.processes.parent import ChildProcess, module_command, without_launcher
from data.progress import STALL_SECONDS, format_seconds
from data.transport.protocol import StateRequest, Transport
from eagle31.errors import UserError

# Consecutive deaths without a sample between them: before the first batch, and with any batch.
_MAX_IDLE_DEATHS, _MAX_FRUITLESS_DEATHS = 3, 12
_MAX_DEATHS_WITH_SAMPLE = 3
_CLOSE_SECONDS = 10.0


class ProcessProducer:
    """A `Producer` of worker processes. Each request goes to the one with the fewest tokens outstanding.

    The processes end with this one, however this one ends. One that has requests and makes no progress is
    ended like one that has died. A sample with which a process died is then computed without others, and is
    refused after three deaths.

    Args:
        module: the module that a worker runs; it calls `data.capture.worker.serve`.
        settings: JSON values for the workers.
        transport: the transport that `settings` describes to the workers.
        stall_seconds: the longest time between a worker's signs of progress: ready, a batch begun, a sample
            done.
        start_seconds: the longest time until a worker is ready; None sets no limit.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        transport: Transport,
        num_processes: int,
        *,
        stall_seconds: float = STALL_SECONDS,
        start_seconds: float | None = None,
    ) -> None:
        self.num_restarts = 0
        self._module = module
        self._settings = settings
        self._transport = transport
        self._stall_seconds, self._start_seconds = stall_seconds, start_seconds
        self._idle_deaths = 0
        self._deaths_with = Counter[str]()  # by key
        self._workers = [_Worker(module, settings) for _ in range(num_processes)]

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.process_id for worker in self._workers]

    def request(self, request: StateRequest) -> None:
        if any(worker.owes(request.key) for worker in self._workers):
            return  # It is on its way.
        min(self._workers, key=lambda worker: worker.owed_tokens).request(request)

    def received(self, key: str) -> None:
        self._deaths_with.pop(key, None)
        for worker in self._workers:
            worker.forget(key)

    def refusals(self) -> dict[str, str]:
        refused: dict[str, str] = {}
        for index, worker in enumerate(self._workers):
            hung = worker.hung(self._stall_seconds, self._start_seconds)
            if hung is not None:
                worker.process.kill()
            if hung is not None or not worker.process.alive:
                self._workers[index] = self._restarted(worker, hung, refused)
            # A dead worker's last answers count, too.
            refused |= worker.take_refused()
        return refused

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _restarted(self, dead: "_Worker", hung: str | None, refused: dict[str, str]) -> "_Worker":
        """Start another worker for one that has ended, with its requests but for those that it refuses.

        Args:
            hung: how it hung, if it did.
            refused: takes the reasons of the requests with which too many workers have died.
        """
        dead.close()
        if dead.process.failure is not None:
            raise UserError(*dead.process.failure)
        how = hung or f"with {dead.process.exit_description}"
        culprits = [key for key in dead.begun if dead.owes(key) and not self._transport.arrived(key)]
        self._count_death(dead, how, culprits)
        for key in culprits:
            self._deaths_with[key] += 1
            if self._deaths_with[key] >= _MAX_DEATHS_WITH_SAMPLE:
                num_deaths = self._deaths_with.pop(key)
                refused[key] = (
                    f"The process that runs the target ended {num_deaths} times with it, at last {how}."
                )
        self.num_restarts += 1
        worker = _Worker(self._module, self._settings)
        for request in dead.owed():
            # It may have delivered a sample without having said so.
            if request.key not in refused and not self._transport.arrived(request.key):
                worker.request(request, alone=request.key in self._deaths_with)
        return worker

    def _count_death(self, dead: "_Worker", how: str, culprits: list[str]) -> None:
        """Raise UserError where workers die whatever they compute."""
        self._idle_deaths = 0 if dead.num_done else self._idle_deaths + 1
        if self._idle_deaths >= (_MAX_FRUITLESS_DEATHS if culprits else _MAX_IDLE_DEATHS):
            remedy = (
                f"The process that runs the target ended {self._idle_deaths} times without a single sample, "
                f"{how}. Its last output: {' | '.join(dead.process.log_tail()) or 'nothing'}"
            )
            raise UserError("capture.source", self._module, remedy)


class _Worker:
    """One process and the requests that it has not answered."""

    def __init__(self, module: str, settings: Mapping[str, Any]) -> None:
        self.num_done = 0
        self.owed_tokens = 0
        self.begun: list[str] = []  # the keys of the last batch
        self._owed: dict[str, StateRequest] = {}
        self._refused: dict[str, str] = {}
        self._lock = threading.Lock()
        self._progressed = time.monotonic()
        self.process = ChildProcess(
            module_command(module),
            settings,
            environment=without_launcher(os.environ),
            began=self._note_progress,
            answered=self._note_answer,
        )

    def owes(self, key: str) -> bool:
        with self._lock:
            return key in self._owed

    def owed(self) -> list[StateRequest]:
        with self._lock:
            return list(self._owed.values())

    def hung(self, stall_seconds: float, start_seconds: float | None) -> str | None:
        """Return how the process hangs, or None."""
        with self._lock:
            seconds, idle = time.monotonic() - self._progressed, not self._owed
        if self.process.ready is None:
            limit, setting, idle = start_seconds, "which is its limit to load the target", False
        else:
            limit, setting = stall_seconds, "which capture.stall_minutes sets"
        if idle or limit is None or seconds <= limit or not self.process.alive:
            return None
        return f"after {format_seconds(limit)} without progress, {setting}"

    def request(self, request: StateRequest, alone: bool = False) -> None:
        with self._lock:
            if not self._owed and self.process.ready is not None:
                self._progressed = time.monotonic()
            self._owed[request.key] = request
            self.owed_tokens += len(request.input_ids)
        self.process.send(request_to_json(request, alone))

    def forget(self, key: str) -> None:
        """Forget a request whose sample has arrived, though the process has not said so."""
        with self._lock:
            request = self._owed.pop(key, None)
            if request is not None:
                self.owed_tokens -= len(request.input_ids)

    def take_refused(self) -> dict[str, str]:
        with self._lock:
            refused, self._refused = self._refused, {}
        return refused

    def close(self) -> None:
        """End the process where it still runs, and read its answers to the end."""
        self.process.close(_CLOSE_SECONDS)

    def _note_progress(self) -> None:
        self._progressed = time.monotonic()

    def _note_answer(self, answer: Message) -> None:
        with self._lock:
            self._progressed = time.monotonic()
            if "begun" in answer:
                self.begun = answer["begun"]
                return
            self.num_done += 1
            key = answer["done"] if "done" in answer else answer["refused"]
            request = self._owed.pop(key, None)
            if request is not None:  # None where it was requested twice
                self.owed_tokens -= len(request.input_ids)
            if "refused" in answer:
                self._refused[key] = answer["reason"]
