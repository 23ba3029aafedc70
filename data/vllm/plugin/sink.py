"""Beside vLLM's worker: takes copied states to stores and transports, bounded and in the background."""

import json
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from data.samples import CapturedSample
from data.store.codec import Encoding
from data.store.writer import StoreWriter
from data.transport.opening import open_transport
from data.transport.protocol import StateRequest, Transport
from data.vllm.capture_request import CaptureRequest
from data.vllm.plugin.cache_copy import HostCopy

# Without a control channel, a pause of this length ends a shard: the last ones appear by themselves.
IDLE_SECONDS = 1.0


@dataclass(frozen=True)
class Delivery:
    """One sample on its way."""

    order: CaptureRequest
    input_ids: Tensor  # int64 [T]
    copy: HostCopy


class StateSink:
    """A thread that writes; at most `max_bytes` of copies wait for it.

    Args:
        name: of this process among the writers of a store.
        num_aux_layers: A; the states' first A columns are the aux layers, their last the last layer's output.
    """

    def __init__(self, name: str, num_aux_layers: int, max_bytes: int) -> None:
        self.name = name
        self.num_aux_layers = num_aux_layers
        self.max_bytes = max_bytes
        self._queue: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._bytes = 0
        self._lock = threading.Lock()
        self._writers: dict[str, StoreWriter] = {}  # by destination
        self._unflushed: set[str] = set()
        self._transports: dict[str, Transport] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="eagle31-states", daemon=True)
        self._thread.start()

    def has_room(self, num_bytes: int) -> bool:
        """A single sample always fits into an empty queue, however long it is."""
        return self._bytes == 0 or self._bytes + num_bytes <= self.max_bytes

    def submit(self, delivery: Delivery) -> None:
        with self._lock:
            self._bytes += delivery.copy.states.nbytes
        self._queue.put(delivery)

    def check(self) -> None:
        """Raises what the thread failed with."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Returns when all that was submitted is written."""
        self._queue.put(None)
        self._thread.join()
        self.check()

    def _run(self) -> None:
        try:
            while self._deliver_next():
                pass
            for writer in self._writers.values():
                writer.close()
        except BaseException as error:
            self._failure = error

    def _deliver_next(self) -> bool:
        try:
            delivery = self._queue.get(timeout=IDLE_SECONDS if self._unflushed else None)
        except queue.Empty:
            while self._unflushed:
                self._writers[self._unflushed.pop()].flush()
            return True
        if delivery is None:
            return False
        delivery.copy.wait()
        self._deliver(delivery)
        with self._lock:
            self._bytes -= delivery.copy.states.nbytes
        return True

    def _deliver(self, delivery: Delivery) -> None:
        order, states = delivery.order, delivery.copy.states
        mask = order.loss_mask(len(states))
        aux, last = states[:, : self.num_aux_layers], states[:, -1]
        place = json.dumps(order.destination, sort_keys=True)
        if "store" in order.destination:
            if place not in self._writers:
                self._writers[place] = _open_writer(order.destination, self.name)
            sample = CapturedSample(delivery.input_ids, mask, aux, last)
            self._writers[place].append(int(order.key), sample)
            self._unflushed.add(place)
        else:
            if place not in self._transports:
                self._transports[place] = open_transport(order.destination)
            self._transports[place].put(StateRequest(order.key, delivery.input_ids, mask), aux, last)


def _open_writer(destination: Mapping[str, Any], name: str) -> StoreWriter:
    encoding = Encoding(**destination["encoding"])
    return StoreWriter(Path(destination["store"]), name, encoding, destination["shard_tokens"])
