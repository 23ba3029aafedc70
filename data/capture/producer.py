"""The producer of hidden states that has engines capture them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from data.capture.dispatch import Dispatcher, EngineClient, EngineThread, Prompt
from data.capture.transport.protocol import StateRequest


class EngineProducer:
    """Sends requests to engines from a thread, while they put the states into the transport.

    Args:
        clients: used by this object only, which closes them.
        task: returns what the clients need besides a request's key and tokens.
        check: raises UserError for a client's engine whose info is not as required.
        patience_seconds: how long all engines may be down at once.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        task: Callable[[StateRequest], Any],
        check: Callable[[Any, Any], None],
        patience_seconds: float,
    ) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._owed: dict[str, Prompt] = {}  # without an answer, by key
        self._refused: dict[str, str] = {}
        self._num_requests = 0
        self._dispatcher = Dispatcher(
            clients,
            check=check,
            answered=lambda prompt, _: self._note_answer(prompt),
            refused=self._note_refusal,
            patience_seconds=patience_seconds,
        )
        self._thread = EngineThread(clients)
        self._running = self._thread.start(self._dispatcher.run())

    @property
    def num_restarts(self) -> int:
        """The number of times that an engine went down."""
        return self._dispatcher.num_failures

    def request(self, request: StateRequest) -> bool:
        """Request a sample and return at once; the states arrive through the transport.

        Returns:
            False where it has been requested before and is not answered yet, so that nothing is done.
        """
        task = self._task(request)
        with self._lock:
            if request.key in self._owed:
                return False
            prompt = Prompt(self._num_requests, request.key, request.input_ids.tolist(), task)
            self._num_requests += 1
            self._owed[request.key] = prompt
        self._thread.call(self._dispatcher.add, prompt)
        return True

    def answered(self, key: str) -> bool:
        """Return whether an engine has answered the request, so that its states are on their way."""
        with self._lock:
            return key not in self._owed

    def received(self, key: str) -> None:
        """Note that the trainer has taken a sample, so that it is not delivered again."""
        with self._lock:
            owed = self._owed.pop(key, None)
        if owed is not None:
            owed.withdrawn = True

    def refusals(self) -> dict[str, str]:
        """Return the requests that were refused since the last call: the reasons by key.

        Raises:
            UserError: no engine answers, or one is not as required.
        """
        if self._running.done():
            self._running.result()
        with self._lock:
            refused, self._refused = self._refused, {}
        return refused

    def close(self) -> None:
        """End the requests that are under way, and close the clients."""
        self._thread.close()

    def _note_answer(self, prompt: Prompt) -> None:
        with self._lock:
            self._owed.pop(prompt.key, None)

    def _note_refusal(self, prompt: Prompt, reason: str) -> None:
        with self._lock:
            self._owed.pop(prompt.key, None)
            if not prompt.withdrawn:
                self._refused[prompt.key] = reason
