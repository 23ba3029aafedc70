"""The delivery of copied states into the spools of a server's clients, in the background."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from data.capture.transport.protocol import StateRequest
from data.capture.transport.spool import Spool, Write
from data.capture.vllm.plugin.cache_copy import HostCopy
from data.store.codec import CODECS

_THREADS = 16  # which encode and write
_REASON_LETTERS = 1000
_FIELDS = {"spool", "codec"}


def destination_spool(destination: Mapping[str, Any], roots: Sequence[str]) -> Spool:
    """Return the spool that a client names, for a server that writes below these directories only.

    Links and `..` in its path are resolved: it is written where it was checked.

    Raises:
        Exception: the server does not deliver there, because of this.
    """
    if destination.keys() != _FIELDS:
        raise ValueError(f"a spool has the fields {sorted(_FIELDS)}, not {sorted(destination)}")
    if destination["codec"] not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, not {str(destination['codec'])[:40]}")
    directory = Path(destination["spool"]).resolve()
    if not any(directory.is_relative_to(Path(root).resolve()) for root in roots):
        raise ValueError(f"{destination['spool']} is not below {', '.join(roots)}")
    if not directory.is_dir():
        raise ValueError(f"{directory} does not exist on the machine of the server")
    return Spool(directory, destination["codec"])


class Deliveries:
    """The samples on their way to all spools, and the host memory that their slices hold.

    A sample that cannot be delivered costs itself only: the reason is in the server's log, and its client
    requests it again.

    Args:
        num_aux_layers: A. The first A columns of the states are the aux layers; the last one is the last
            layer's output.
        limit_bytes: the host memory for all copies.
    """

    def __init__(self, num_aux_layers: int, limit_bytes: int) -> None:
        self.num_aux_layers, self._limit_bytes = num_aux_layers, limit_bytes
        self._lock, self._held_bytes = threading.Lock(), 0
        # A sample has one of them, which keeps its slices in order.
        self._threads = deque(ThreadPoolExecutor(1, "eagle31-delivery") for _ in range(_THREADS))

    def has_room(self, num_bytes: int) -> bool:
        """Return whether another copy may begin; one at least always may."""
        with self._lock:
            return self._held_bytes == 0 or self._held_bytes + num_bytes <= self._limit_bytes

    def open(self, spool: Spool, request: StateRequest) -> "Delivery":
        """Return a sample that is delivered in the background."""
        self._threads.rotate()
        return Delivery(self, spool, request, self._threads[0])

    def hold(self, num_bytes: int) -> None:
        """Count the memory of a copy; it is negative at the copy's end."""
        with self._lock:
            self._held_bytes += num_bytes

    def close(self) -> None:
        """Return when everything submitted is delivered."""
        for thread in self._threads:
            thread.shutdown()


class Delivery:
    """A sample on its way, whose slices are written into the spool one after another."""

    def __init__(
        self, deliveries: Deliveries, spool: Spool, request: StateRequest, thread: ThreadPoolExecutor
    ) -> None:
        self.num_tokens = 0  # whose copies were added
        self.is_copied: Callable[[], bool] = lambda: True  # whether these copies have finished
        self._deliveries, self._spool, self._request, self._thread = deliveries, spool, request, thread
        self._opened = ExitStack()  # what the spool has of the sample
        self._write: Write | None = None

    def add(self, copy: HostCopy) -> None:
        """Deliver the states of the next tokens. After the last ones, the sample arrives."""
        self.num_tokens, self.is_copied = self.num_tokens + len(copy.states), copy.finished
        self._deliveries.hold(copy.num_bytes)
        self._thread.submit(self._put, copy, self.num_tokens == len(self._request.input_ids))

    def _put(self, copy: HostCopy, is_last: bool) -> None:
        try:
            with self._opened as opened:
                if self._write is None:
                    self._write = opened.enter_context(self._spool.writing(self._request))
                copy.wait()
                self._write(copy.states[:, : self._deliveries.num_aux_layers], copy.states[:, -1])
                if not is_last:
                    self._opened = opened.pop_all()
        except Exception as error:
            self._write = lambda aux, final: None  # for its other slices
            what = f"{type(error).__name__}: {error}"[:_REASON_LETTERS]
            print(f"eagle31: {self._request.key} was not delivered: {what}", file=sys.stderr, flush=True)
        finally:
            self._deliveries.hold(-copy.num_bytes)
