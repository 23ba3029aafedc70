"""An outlet of the sink: the thread that writes the samples of one destination."""

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
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

_ENCODING_THREADS = 4
_WRITING_THREADS = 2  # shards that are written at a time, and in memory besides the open one


@dataclass(frozen=True)
class PendingWrite:
    """One sample that is to be written."""

    capture: CaptureRequest
    input_ids: Tensor  # int64 [T]
    copy: HostCopy


@dataclass(frozen=True)
class OutletTimes:
    """After how many seconds without a sample an outlet does something, and when it counts as stuck.

    flush: it closes the open shard. A client asks for that at its end, unless it was killed.
    idle: it closes the store or the transport. The next sample opens it again.
    stuck: with a sample, it has made no progress for so long.
    """

    flush: float = 30.0
    idle: float = 300.0
    stuck: float = 300.0


class Outlet:
    """A thread that writes the samples of one destination; for a store, others encode them.

    An error ends this outlet only: the samples that wait are dropped, and `failed` is called once.

    Args:
        name: the destination's name.
        writer_name: the name of this process among the writers of a store.
        num_aux_layers: A. The first A columns of the states are the aux layers; the last one is the last
            layer's output.
        after: an outlet of the same destination that is ending.
        written: called after each sample, whether it was written or dropped.
        failed: called with the error.
    """

    def __init__(
        self,
        name: str,
        writer_name: str,
        num_aux_layers: int,
        times: OutletTimes,
        after: "Outlet | None",
        written: Callable[["Outlet", PendingWrite], None],
        failed: Callable[["Outlet", BaseException], None],
    ) -> None:
        self.name = name
        self.clients: set[str] = set()  # whose samples it has had; changed by the sink only
        self.held_bytes = 0  # of samples that were submitted and not yet written; changed by the sink only
        self.progressed = time.monotonic()
        self.is_open = False
        self._writer_name, self._num_aux_layers, self._times = writer_name, num_aux_layers, times
        self._after, self._written, self._failed = after, written, failed
        self._queue: queue.SimpleQueue[PendingWrite | Callable[[], None] | None] = queue.SimpleQueue()
        self._settings = ""  # of what is open
        self._encoders = ThreadPoolExecutor(_ENCODING_THREADS, "eagle31-encoder")
        self._encoding: deque[Future[None]] = deque()
        self._store: StoreWriter | None = None
        self._transport: Transport | None = None
        self._unflushed = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="eagle31-outlet", daemon=True)
        self._thread.start()

    def put(self, pending: PendingWrite) -> None:
        """Queue a sample."""
        self._queue.put(pending)

    def flush(self) -> None:
        """Have the open shard closed, after what is queued."""
        self._queue.put(self._flush)

    def end(self) -> None:
        """Close the destination and end the thread, after what is queued. This does not wait."""
        self._queue.put(None)

    def abandon(self) -> None:
        """Drop what is queued, once the thread gets on."""
        self._abandoned = True
        self.end()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._after is not None:
            self._after.join()  # One writer of a store at a time has the name.
            self._after = None
        try:
            while self._step():
                pass
            self._close()
        except BaseException as error:
            self._abandon()
            self._failed(self, error)
            self._drop_the_rest()
        self._encoders.shutdown(wait=False)

    def _step(self) -> bool:
        try:
            item = self._queue.get(timeout=self._pause())
        except queue.Empty:
            self._flush() if self._unflushed else self._close()
            return True
        if item is None:
            return False
        if isinstance(item, PendingWrite):
            self._take(item)
        else:
            item()
        return True

    def _pause(self) -> float | None:
        if self._unflushed:
            return self._times.flush
        return self._times.idle if self.is_open else None

    def _take(self, pending: PendingWrite) -> None:
        if self._abandoned:
            self._drop(pending)
            return
        try:
            self._open(pending.capture.destination)
        except BaseException:
            self._drop(pending)
            raise
        if self._store is None:
            self._deliver(pending, self._put)
        else:
            self._unflushed = True
            append = partial(self._append, self._store)
            self._encoding.append(self._encoders.submit(self._deliver, pending, append))
            while self._encoding and self._encoding[0].done():
                self._encoding.popleft().result()

    def _deliver(self, pending: PendingWrite, write: Callable[[PendingWrite], None]) -> None:
        """Write a sample, and release its memory."""
        pending.copy.wait()
        try:
            if not self._abandoned:
                write(pending)
        finally:
            self._release(pending)

    def _append(self, store: StoreWriter, pending: PendingWrite) -> None:
        capture, states = pending.capture, pending.copy.states
        mask, aux = capture.loss_mask(len(states)), states[:, : self._num_aux_layers]
        store.append_copy(int(capture.key), CapturedSample(pending.input_ids, mask, aux, states[:, -1]))

    def _put(self, pending: PendingWrite) -> None:
        assert self._transport is not None
        capture, states = pending.capture, pending.copy.states
        request = StateRequest(capture.key, pending.input_ids, capture.loss_mask(len(states)))
        self._transport.put(request, states[:, : self._num_aux_layers], states[:, -1])

    def _drop(self, pending: PendingWrite) -> None:
        pending.copy.wait()
        self._release(pending)

    def _release(self, pending: PendingWrite) -> None:
        self._written(self, pending)
        self.progressed = time.monotonic()

    def _open(self, destination: Any) -> None:
        """Open the destination, unless it is open with the same settings."""
        settings = json.dumps(destination, sort_keys=True)
        if settings == self._settings and self.is_open:
            return
        self._close()
        if "store" in destination:
            encoding = Encoding(**destination["encoding"])
            directory = Path(destination["store"])
            self._store = StoreWriter(
                directory,
                self._writer_name,
                encoding,
                destination["shard_tokens"],
                num_threads=_WRITING_THREADS,
            )
        else:
            self._transport = open_transport(destination)
        self._settings, self.is_open = settings, True

    def _flush(self) -> None:
        while self._encoding:
            self._encoding.popleft().result()
        if self._store is not None:
            self._store.flush()
        self._unflushed = False

    def _close(self) -> None:
        store, transport, encoding = self._store, self._transport, list(self._encoding)
        self._encoding.clear()
        wait(encoding)
        self._store = self._transport = None
        self.is_open = self._unflushed = False
        if store is not None:
            store.close()
        if transport is not None:
            transport.close()
        for future in encoding:
            future.result()

    def _abandon(self) -> None:
        try:
            self._close()
        except BaseException:  # It fails as it did before.
            return

    def _drop_the_rest(self) -> None:
        """Drop what is queued. Nothing is added any more: the sink has heard of the failure."""
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, PendingWrite):
                self._drop(item)
