"""The sink next to vLLM's worker: it writes copied states to stores and transports in the background."""

import sys
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from data.vllm.capture_request import CaptureRequest
from data.vllm.destinations import name_of
from data.vllm.plugin.outlet import Outlet, OutletTimes, PendingWrite
from data.vllm.plugin.staging import Region, Staging

# Each has a thread, and a store its open shard.
MAX_DESTINATIONS = 64
_FAILURES_KEPT = 1000
_REASON_LETTERS = 1000


class Failure(NamedTuple):
    """A destination that failed for a client."""

    client: str
    destination: str
    reason: str


class Failures:
    """The destinations that failed, by client. It forgets the oldest of very many."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}

    def add(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            if failure.client:  # Nobody could ask for the others.
                self._reasons[failure.client, failure.destination] = failure.reason
        while len(self._reasons) > _FAILURES_KEPT:
            del self._reasons[next(iter(self._reasons))]

    def reason(self, capture: CaptureRequest) -> str | None:
        """Return why the request's destination failed for its client, or None."""
        return self._reasons.get((capture.client, name_of(capture.destination)))

    def of_client(self, client: str) -> list[str]:
        """Return the reasons for all destinations of a client that failed."""
        return [reason for (one, _), reason in self._reasons.items() if one == client]


class StateSink:
    """An outlet for each destination. The copies that wait for all of them are in the staging memory.

    A destination that fails or is stuck costs its own samples only. One that takes no more samples for a
    while holds no more than half of the memory, the next such one half of the rest, and so on.

    Args:
        name: the name of this process among the writers of a store.
        num_aux_layers: A. The first A columns of the states are the aux layers; the last one is the last
            layer's output.
        staging: the memory of the copies. Copies of a destination are released once they are written, or
            encoded for a store.
        max_destinations: how many may be open. More open ones fail, unless one has nothing to write.
    """

    def __init__(
        self,
        name: str,
        num_aux_layers: int,
        staging: Staging,
        max_destinations: int = MAX_DESTINATIONS,
        times: OutletTimes | None = None,
    ) -> None:
        self.name = name
        self.num_aux_layers = num_aux_layers
        self.staging = staging
        self.max_destinations = max_destinations
        self._times = times or OutletTimes()
        self._lock = threading.Lock()  # guards the fields below, and those of the outlets that say so
        self._outlets: dict[str, Outlet] = {}  # by destination, the one that was used last at the end
        self._ending: dict[str, Outlet] = {}  # by destination
        self._failed = Failures()
        self._news: list[Failure] = []

    def reserve(self, capture: CaptureRequest, num_bytes: int) -> Region | None:
        """Return memory for another copy for this destination, or None while it must wait."""
        with self._lock:
            outlet = self._outlets.get(name_of(capture.destination))
            held = 0 if outlet is None else outlet.held_bytes
            if held and held + num_bytes > self.staging.free_bytes:
                return None
            return self.staging.take(num_bytes)

    def has_failed(self, capture: CaptureRequest) -> bool:
        """Return whether the request's destination failed for its client."""
        with self._lock:
            return self._failed.reason(capture) is not None

    def submit(self, pending: PendingWrite) -> None:
        """Queue a sample for writing, or drop it where its destination has failed."""
        if not self._queued(pending):
            pending.copy.wait()
            self.staging.give(pending.copy.region)

    def _queued(self, pending: PendingWrite) -> bool:
        name = name_of(pending.capture.destination)
        with self._lock:
            if self._failed.reason(pending.capture) is not None:
                return False
            outlet = self._outlets.pop(name, None) or self._new_outlet(name)
            if outlet is None:
                what = f"The server writes to {self.max_destinations} destinations already."
                self._note([Failure(pending.capture.client, name, what)])
                return False
            self._outlets[name] = outlet
            if outlet.held_bytes == 0:
                outlet.progressed = time.monotonic()
            outlet.clients.add(pending.capture.client)
            outlet.held_bytes += pending.copy.region.num_bytes
            outlet.put(pending)
            return True

    def flush(self, client: str) -> None:
        """Close the open shards of a client, in the background."""
        with self._lock:
            for outlet in self._outlets.values():
                if client in outlet.clients:
                    outlet.flush()

    def fail_stuck(self) -> None:
        """Give up the destinations that have made no progress for too long."""
        before = time.monotonic() - self._times.stuck
        with self._lock:
            stuck = [one for one in self._outlets.values() if one.held_bytes and one.progressed < before]
        for outlet in stuck:
            outlet.abandon()
            self._fail(outlet, TimeoutError(f"no state was written for {self._times.stuck:.0f} seconds"))

    def take_news(self) -> list[Failure]:
        """Return the failures since the last call."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Return when everything submitted is written."""
        with self._lock:
            outlets = [*self._ending.values(), *self._outlets.values()]
        for outlet in outlets:
            outlet.end()
        for outlet in outlets:
            outlet.join()

    def _new_outlet(self, name: str) -> Outlet | None:
        """Return an outlet, if there may be another one; the one that was used least recently makes room."""
        self._ending = {key: one for key, one in self._ending.items() if not one.has_ended}
        if len(self._outlets) >= self.max_destinations:
            idle = next((key for key, one in self._outlets.items() if one.held_bytes == 0), None)
            if idle is None:
                return None
            self._ending[idle] = self._outlets.pop(idle)
            self._ending[idle].end()
        after = self._ending.pop(name, None)
        return Outlet(name, self.name, self.num_aux_layers, self._times, after, self._written, self._fail)

    def _written(self, outlet: Outlet, pending: PendingWrite) -> None:
        with self._lock:
            outlet.held_bytes -= pending.copy.region.num_bytes
        self.staging.give(pending.copy.region)

    def _fail(self, outlet: Outlet, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"[:_REASON_LETTERS]
        with self._lock:
            if self._outlets.get(outlet.name) is outlet:
                del self._outlets[outlet.name]
            self._note(Failure(client, outlet.name, reason) for client in sorted(outlet.clients))

    def _note(self, failures: Iterable[Failure]) -> None:
        failures = list(failures)
        self._failed.add(failures)
        self._news += failures
        for failure in failures:
            what = f"eagle31: states for {failure.destination} are dropped: {failure.reason}"
            print(what, file=sys.stderr, flush=True)
