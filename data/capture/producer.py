"""The producer of hidden states that has engines capture them."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from data.capture.dispatch import Dispatcher, EngineClient, Prompt
from data.capture.transport.protocol import StateRequest


class EngineProducer:
    """Sends requests to engines from a thread, while they put the states into the transport.

    Every method raises the error that has ended the thread.

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
        self._failure: BaseException | None = None
        self._clients = clients
        self._dispatcher = Dispatcher(
            clients,
            check=check,
            answered=lambda prompt, _: self._note_answer(prompt),
            refused=self._note_refusal,
            patience_seconds=patience_seconds,
        )
        self._loop = asyncio.new_event_loop()
        self._running: asyncio.Task[None] = self._loop.create_task(self._dispatcher.run())
        self._thread = threading.Thread(target=self._run, name="engine-producer", daemon=True)
        self._thread.start()

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
        try:
            self._loop.call_soon_threadsafe(self._dispatcher.add, prompt)
        except RuntimeError:
            self._thread.join()  # The loop is closed.
            self._raise_failure()
            raise
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
        """Return the requests that were refused since the last call: the reasons by key."""
        self._raise_failure()
        with self._lock:
            refused, self._refused = self._refused, {}
        return refused

    def close(self) -> None:
        """End the requests that are under way, and close the clients."""
        with contextlib.suppress(RuntimeError):  # the thread may close the loop at any time
            self._loop.call_soon_threadsafe(self._running.cancel)
        self._thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _note_answer(self, prompt: Prompt) -> None:
        with self._lock:
            self._owed.pop(prompt.key, None)

    def _note_refusal(self, prompt: Prompt, reason: str) -> None:
        with self._lock:
            self._owed.pop(prompt.key, None)
            if not prompt.withdrawn:
                self._refused[prompt.key] = reason

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._running)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            for client in self._clients:
                self._loop.run_until_complete(client.close())
            self._loop.close()
