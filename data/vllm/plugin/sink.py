"""The sink next to vLLM's worker: it writes copied states to stores and transports in the background."""

import json
import queue
import sys
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
from data.transport.protocol import ReceiverGone, StateRequest, Transport
from data.vllm.capture_request import CaptureRequest
from data.vllm.plugin.cache_copy import HostCopy

# The client cannot end a shard, so a pause of this length does.
IDLE_SECONDS = 1.0


@dataclass(frozen=True)
class PendingWrite:
    """One sample that is to be written."""

    capture: CaptureRequest
    input_ids: Tensor  # int64 [T]
    copy: HostCopy


class StateSink:
    """A thread that writes. At most `max_bytes` of copies wait for it.

    Args:
        name: the name of this process among the writers of a store.
        num_aux_layers: A. The first A columns of the states are the aux layers; the last one is the last
            layer's output.
    """

    def __init__(self, name: str, num_aux_layers: int, max_bytes: int) -> None:
        self.name = name
        self.num_aux_layers = num_aux_layers
        self.max_bytes = max_bytes
        self._queue: queue.SimpleQueue[PendingWrite | None] = queue.SimpleQueue()
        self._bytes = 0
        self._lock = threading.Lock()
        self._writers: dict[str, StoreWriter] = {}  # by destination
        self._unflushed: set[str] = set()
        self._transports: dict[str, Transport] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="eagle31-states", daemon=True)
        self._thread.start()

    def has_room(self, num_bytes: int) -> bool:
        """Return whether another copy may wait. A single one of any size may always wait."""
        return self._bytes == 0 or self._bytes + num_bytes <= self.max_bytes

    def submit(self, pending: PendingWrite) -> None:
        """Queue a sample for writing."""
        with self._lock:
            self._bytes += pending.copy.states.nbytes
        self._queue.put(pending)

    def check(self) -> None:
        """Raise the error that ended the thread, if any."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Return when everything submitted is written."""
        self._queue.put(None)
        self._thread.join()
        self.check()

    def _run(self) -> None:
        try:
            while self._write_next():
                pass
            for writer in self._writers.values():
                writer.close()
        except BaseException as error:
            self._failure = error

    def _write_next(self) -> bool:
        try:
            pending = self._queue.get(timeout=IDLE_SECONDS if self._unflushed else None)
        except queue.Empty:
            while self._unflushed:
                self._writers[self._unflushed.pop()].flush()
            return True
        if pending is None:
            return False
        pending.copy.wait()
        self._write(pending)
        with self._lock:
            self._bytes -= pending.copy.states.nbytes
        return True

    def _write(self, pending: PendingWrite) -> None:
        capture, states = pending.capture, pending.copy.states
        mask = capture.loss_mask(len(states))
        aux, final = states[:, : self.num_aux_layers], states[:, -1]
        name = json.dumps(capture.destination, sort_keys=True)
        if "store" in capture.destination:
            if name not in self._writers:
                self._writers[name] = _open_writer(capture.destination, self.name)
            sample = CapturedSample(pending.input_ids, mask, aux, final)
            self._writers[name].append(int(capture.key), sample)
            self._unflushed.add(name)
        else:
            if name not in self._transports:
                self._transports[name] = open_transport(capture.destination)
            try:
                self._transports[name].put(StateRequest(capture.key, pending.input_ids, mask), aux, final)
            except ReceiverGone as reason:
                # Nobody waits for these states, and other trainers may use this server.
                del self._transports[name]
                print(f"states of {capture.key} are dropped: {reason}", file=sys.stderr, flush=True)


def _open_writer(destination: Mapping[str, Any], name: str) -> StoreWriter:
    encoding = Encoding(**destination["encoding"])
    return StoreWriter(Path(destination["store"]), name, encoding, destination["shard_tokens"])
