"""Processes that run the target next to a trainer, and are started again when they die."""

import os
import threading
from collections.abc import Mapping
from typing import Any

from data.capture.worker import request_to_json
from data.processes.child import Message
from data.processes.parent import ChildProcess, module_command, without_launcher
from data.transport.protocol import StateRequest, Transport
from eagle31.errors import UserError

_MAX_IDLE_DEATHS = 3  # consecutive deaths without a sample between them
_CLOSE_SECONDS = 10.0


class ProcessProducer:
    """A `Producer` of worker processes. Each request goes to the one with the fewest tokens outstanding.

    The processes end with this one, however this one ends.

    Args:
        module: the module that a worker runs; it calls `data.capture.worker.serve`.
        settings: JSON values for the workers.
        transport: the transport that `settings` describes to the workers.
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
        return [worker.process.process_id for worker in self._workers]

    def request(self, request: StateRequest) -> None:
        if any(worker.owes(request.key) for worker in self._workers):
            return  # It is on its way.
        min(self._workers, key=lambda worker: worker.owed_tokens).request(request)

    def refusals(self) -> dict[str, str]:
        refused: dict[str, str] = {}
        for index, worker in enumerate(self._workers):
            if not worker.process.alive:
                self._workers[index] = self._restarted(worker)
            # A dead worker's last answers count, too.
            refused |= worker.take_refused()
        return refused

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _restarted(self, dead: "_Worker") -> "_Worker":
        dead.close()
        if dead.process.failure is not None:
            raise UserError(*dead.process.failure)
        self._idle_deaths = 0 if dead.num_answers else self._idle_deaths + 1
        if self._idle_deaths >= _MAX_IDLE_DEATHS:
            remedy = (
                f"The process that runs the target ended {self._idle_deaths} times without a single sample, "
                f"with {dead.process.exit_description}. Its last output: "
                f"{' | '.join(dead.process.log_tail()) or 'nothing'}"
            )
            raise UserError("capture.source", self._module, remedy)
        self.num_restarts += 1
        worker = _Worker(self._module, self._settings)
        for request in dead.owed():
            # It may have delivered a sample without having said so.
            if not self._transport.arrived(request.key):
                worker.request(request)
        return worker


class _Worker:
    """One process and the requests that it has not answered."""

    def __init__(self, module: str, settings: Mapping[str, Any]) -> None:
        self.num_answers = 0
        self.owed_tokens = 0
        self._owed: dict[str, StateRequest] = {}
        self._refused: dict[str, str] = {}
        self._lock = threading.Lock()
        self.process = ChildProcess(
            module_command(module),
            settings,
            environment=without_launcher(os.environ),
            answered=self._note_answer,
        )

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
        self.process.send(request_to_json(request))

    def take_refused(self) -> dict[str, str]:
        with self._lock:
            refused, self._refused = self._refused, {}
        return refused

    def close(self) -> None:
        """End the process where it still runs, and read its answers to the end."""
        self.process.close(_CLOSE_SECONDS)

    def _note_answer(self, answer: Message) -> None:
        with self._lock:
            self.num_answers += 1
            key = answer["done"] if "done" in answer else answer["refused"]
            request = self._owed.pop(key, None)
            if request is not None:  # None where it was requested twice
                self.owed_tokens -= len(request.input_ids)
            if "refused" in answer:
                self._refused[key] = answer["reason"]
