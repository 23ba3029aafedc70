"""The producer of online training that uses vLLM servers."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.transport.protocol import StateRequest, Transport
from data.vllm.capture_request import CaptureRequest
from data.vllm.dispatch import Dispatcher, Origin, Prompt
from data.vllm.endpoint import Endpoint
from data.vllm.server_info import ServerInfo

_ANSWERED_KEPT = 64  # as many as `OnlineStates` discards where they come twice
# The states of an answer come at once, unless a disk is slow or the engine has ended. While no request is
# under way, nothing else shows the latter.
_DOUBT_SECONDS = 5.0
_POLL_SECONDS = 0.02


@dataclass
class _Answer:
    """An answer whose states have not arrived yet."""

    prompt: Prompt
    origin: Origin
    expected_at: float  # after which its engine is looked at


class VllmProducer:
    """A `Producer` that sends requests from a thread, while vLLM puts the states into the transport.

    When an engine dies, the requests that were under way are sent again, and so are those that it had
    answered just before and whose states have not arrived. Every method raises the error that has ended the
    thread.

    Args:
        endpoints: used by this object only, which closes them.
        transport: a transport that the servers reach under the same path or address.
        check: raises UserError for a server that is not set up as required.
        patience_seconds: how long all endpoints may be down at once.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        transport: Transport,
        check: Callable[[Endpoint, ServerInfo], None],
        patience_seconds: float,
    ) -> None:
        self._transport = transport
        self._destination = transport.to_json()
        self._lock = threading.Lock()
        self._owed: dict[str, Prompt] = {}
        self._answered: dict[str, _Answer] = {}
        self._refused: dict[str, str] = {}
        self._num_requests = 0
        self._failure: BaseException | None = None
        self._dispatcher = Dispatcher(
            endpoints,
            check=check,
            answered=self._note_answer,
            refused=self._note_refusal,
            patience_seconds=patience_seconds,
        )
        self._loop = asyncio.new_event_loop()
        self._running: asyncio.Task[None] = self._loop.create_task(self._dispatcher.run())
        self._thread = threading.Thread(target=self._run, name="vllm-producer", daemon=True)
        self._thread.start()

    @property
    def num_restarts(self) -> int:
        """The number of times that an endpoint went down."""
        return sum(link.num_failures for link in self._dispatcher.links)

    def request(self, request: StateRequest) -> None:
        input_ids = request.input_ids.tolist()
        capture = CaptureRequest.of(self._destination, request.key, input_ids, request.loss_mask)
        with self._lock:
            if request.key in self._owed:
                return  # It is on its way.
            prompt = Prompt(self._num_requests, request.key, input_ids, capture.to_params())
            self._num_requests += 1
            answered = self._answered.pop(request.key, None)
            if answered is not None:
                # Its states have not come, and will not, nor will the others of that engine.
                self._dispatcher.give_up(answered.origin)
            self._owed[request.key] = prompt
        self._send(prompt)

    def received(self, key: str) -> None:
        with self._lock:
            self._answered.pop(key, None)
            owed = self._owed.pop(key, None)
        if owed is not None:
            owed.withdrawn = True

    def refusals(self) -> dict[str, str]:
        self._raise_failure()
        with self._lock:
            lost = self._take_lost()
            for prompt in lost:
                self._owed[prompt.key] = prompt
            refused, self._refused = self._refused, {}
        for prompt in lost:
            self._send(prompt)
        return refused

    def finish(self, seconds: float) -> None:
        """Send nothing more, and wait until all states that were sent for have come, for so long at most.

        For a transport that keeps what comes once its receiver has ended.
        """
        deadline = time.monotonic() + seconds
        stopped = threading.Event()

        def stop_sending() -> None:
            self._dispatcher.stop_sending()
            stopped.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(stop_sending)
        while self._thread.is_alive() and time.monotonic() < deadline:
            if stopped.is_set() and not self._dispatcher.num_under_way:
                with self._lock:
                    self._take_lost()  # for nobody
                    if not self._answered:
                        return
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End the requests that are under way, and close the endpoints."""
        with contextlib.suppress(RuntimeError):  # the thread may close the loop at any time
            self._loop.call_soon_threadsafe(self._running.cancel)
        self._thread.join()

    def _take_lost(self) -> list[Prompt]:
        """Return the answered prompts whose states will not come, and keep those whose states may come.

        Where states are late, their endpoint is looked at. The caller holds the lock.
        """
        now, lost = time.monotonic(), []
        for key, answer in list(self._answered.items()):
            if self._transport.arrived(key):
                del self._answered[key]
            elif self._dispatcher.is_lost(answer.origin):
                lost.append(self._answered.pop(key).prompt)
            elif answer.expected_at < now:
                answer.expected_at = now + _DOUBT_SECONDS
                self._dispatcher.doubt(answer.origin)
        return lost

    def _send(self, prompt: Prompt) -> None:
        try:
            self._loop.call_soon_threadsafe(self._dispatcher.add, prompt)
        except RuntimeError:
            self._thread.join()  # The loop is closed.
            self._raise_failure()
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _note_answer(self, prompt: Prompt, origin: Origin, _: list[int]) -> None:
        with self._lock:
            if prompt.withdrawn:
                return
            self._owed.pop(prompt.key, None)
            self._answered[prompt.key] = _Answer(prompt, origin, time.monotonic() + _DOUBT_SECONDS)
            while len(self._answered) > _ANSWERED_KEPT:
                del self._answered[next(iter(self._answered))]

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
            for link in self._dispatcher.links:
                self._loop.run_until_complete(link.endpoint.close())
            self._loop.close()
