"""The delivery of copied states through the transports of a server's clients, in the background."""

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from data.capture.transport.mooncake import MooncakeTransport
from data.capture.transport.protocol import StateRequest, Transport, Write
from data.capture.transport.spool import Spool
from data.capture.vllm.capture_request import CaptureRequest
from data.capture.vllm.plugin.cache_copy import HostCopy
from data.store.codec import CODECS

MAX_DESTINATIONS = 64
_THREADS = 4  # of a destination, which encode and write
_REASON_LETTERS = 1000
_DTYPES = ("bfloat16", "float16", "float32")
_FIELDS = {
    "spool": {"spool", "codec"},
    "mooncake": {"mooncake", "num_aux_layers", "hidden_size", "dtype"},
}


@dataclass(frozen=True)
class Accepted:
    """The destinations that a server delivers to.

    roots: it writes in these directories only.
    mooncake_masters: the Mooncake stores that it may put into, as HOST:PORT.
    num_aux_layers, hidden_size: the size of its states.
    """

    roots: Sequence[str]
    mooncake_masters: Sequence[str]
    num_aux_layers: int
    hidden_size: int

    def refusal(self, destination: Mapping[str, Any]) -> str | None:
        """Return why the server does not deliver to a destination, or None.

        Raises:
            KeyError, TypeError, ValueError, OSError, UserError: `destination` is no destination.
        """
        (kind,) = _FIELDS.keys() & destination.keys()
        if destination.keys() != _FIELDS[kind]:
            return f"A {kind} has the fields {sorted(_FIELDS[kind])}, not {sorted(destination)}."
        if kind == "mooncake":
            return self._mooncake_refusal(destination)
        if destination["codec"] not in CODECS:
            return f"codec must be one of {', '.join(CODECS)}, not {str(destination['codec'])[:40]}."
        directory = os.path.realpath(destination["spool"])
        if not any(Path(directory).is_relative_to(os.path.realpath(root)) for root in self.roots):
            return f"{destination['spool']} is not below {', '.join(self.roots)}."
        if not os.path.isdir(directory):
            return f"{directory} does not exist on the machine of the server."
        return None

    def _mooncake_refusal(self, destination: Mapping[str, Any]) -> str | None:
        settings = destination["mooncake"]
        if settings["master"] not in self.mooncake_masters:
            return f"{settings['master']} is not one of the Mooncake stores that the server may use."
        if settings["segment_bytes"] != 0:
            return "The server lends no memory to a Mooncake store."
        if destination["dtype"] not in _DTYPES:
            return f"dtype must be one of {', '.join(_DTYPES)}, not {str(destination['dtype'])[:40]}."
        size = (destination["num_aux_layers"], destination["hidden_size"])
        if size != (self.num_aux_layers, self.hidden_size):
            captured = f"{self.num_aux_layers} aux layers of {self.hidden_size}"
            return f"The server captures {captured}, not {size[0]} of {size[1]}."
        return None


def resolved(destination: Mapping[str, Any]) -> dict[str, Any]:
    """Return the destination with links and `..` in its path resolved: it is written where it was checked."""
    if "spool" not in destination:
        return dict(destination)
    return {**destination, "spool": os.path.realpath(destination["spool"])}


class _Outlet:
    """A destination, with the threads that put samples into it."""

    def __init__(self, destination: Mapping[str, Any]) -> None:
        # Samples that were opened, and the memory of their slices that were not yet put; guarded by the
        # deliveries.
        self.num_open, self.held_bytes = 0, 0
        self._destination = destination
        self._transport: Transport | None = None
        self._opening = threading.Lock()
        # A sample has one of them, which keeps its slices in order.
        self._threads = deque(ThreadPoolExecutor(1, "eagle31-delivery") for _ in range(_THREADS))

    def transport(self) -> Transport:
        with self._opening:
            if self._transport is None:
                kind = MooncakeTransport if "mooncake" in self._destination else Spool
                self._transport = kind.from_json(self._destination)
            return self._transport

    def next_thread(self) -> ThreadPoolExecutor:
        self._threads.rotate()
        return self._threads[0]

    def close(self) -> None:
        """Close the destination after what was submitted."""
        for thread in self._threads:
            thread.shutdown()
        if self._transport is not None:
            self._transport.close()


class Deliveries:
    """The samples on their way to all destinations, and the host memory that their slices hold.

    A sample that cannot be delivered costs itself only: the reason is in the server's log, and its client
    requests it again. A destination holds at most half of the memory, so that one that is slow leaves room
    for the others.

    Args:
        num_aux_layers: A. The first A columns of the states are the aux layers; the last one is the last
            layer's output.
        limit_bytes: the host memory for all copies.
    """

    def __init__(self, num_aux_layers: int, limit_bytes: int) -> None:
        self._num_aux_layers, self._limit_bytes = num_aux_layers, limit_bytes
        self._lock = threading.Lock()
        self._outlets: dict[str, _Outlet] = {}  # the one that was used last at the end
        self._held_bytes = 0

    def has_room(self, destination: Mapping[str, Any], num_bytes: int) -> bool:
        """Return whether another copy for this destination may begin; one at least always may."""
        with self._lock:
            outlet = self._outlets.get(_name(destination))
            held = 0 if outlet is None else outlet.held_bytes
            fits = self._held_bytes + num_bytes <= self._limit_bytes
            fair = held == 0 or held + num_bytes <= self._limit_bytes // 2
            return self._held_bytes == 0 or (fits and fair)

    def open(self, capture: CaptureRequest, input_ids: Tensor) -> "Delivery":
        """Return a sample that is delivered in the background. input_ids int64 [T]."""
        with self._lock:
            outlet = self._outlet(capture.destination)
            outlet.num_open += 1
        request = StateRequest(capture.key, input_ids, capture.loss_mask(len(input_ids)))
        return Delivery(self, outlet, request, self._num_aux_layers)

    def hold(self, outlet: _Outlet, num_bytes: int, *, closes: bool = False) -> None:
        """Count the memory of a copy; it is negative at the copy's end, which may be that of the sample."""
        with self._lock:
            outlet.held_bytes += num_bytes
            self._held_bytes += num_bytes
            outlet.num_open -= closes

    def close(self) -> None:
        """Return when everything submitted is delivered."""
        for outlet in self._outlets.values():
            outlet.close()

    def _outlet(self, destination: Mapping[str, Any]) -> _Outlet:
        name = _name(destination)
        outlet = self._outlets.pop(name, None) or _Outlet(destination)
        if len(self._outlets) >= MAX_DESTINATIONS:
            idle = next((key for key, one in self._outlets.items() if one.num_open == 0), None)
            if idle is not None:
                self._outlets.pop(idle).close()
        self._outlets[name] = outlet
        return outlet


class Delivery:
    """A sample on its way, whose slices are put into the transport one after another."""

    def __init__(
        self, deliveries: Deliveries, outlet: _Outlet, request: StateRequest, num_aux_layers: int
    ) -> None:
        self.num_tokens = 0  # whose copies were added
        self.is_copied: Callable[[], bool] = lambda: True  # whether these copies have finished
        self._deliveries, self._outlet, self._thread = deliveries, outlet, outlet.next_thread()
        self._request, self._num_aux_layers = request, num_aux_layers
        self._opened = ExitStack()  # what the transport has of the sample
        self._write: Write | None = None

    def add(self, copy: HostCopy) -> None:
        """Deliver the states of the next tokens. After the last ones, the sample arrives."""
        self.num_tokens, self.is_copied = self.num_tokens + len(copy.states), copy.finished
        self._deliveries.hold(self._outlet, copy.num_bytes)
        self._thread.submit(self._put, copy, self.num_tokens == len(self._request.input_ids))

    def abandon(self) -> None:
        """Remove what was delivered of the sample."""
        self._thread.submit(self._remove)

    def _put(self, copy: HostCopy, is_last: bool) -> None:
        try:
            with self._opened as opened:
                if self._write is None:
                    self._write = opened.enter_context(self._outlet.transport().writing(self._request))
                copy.wait()
                self._write(copy.states[:, : self._num_aux_layers], copy.states[:, -1])
                if not is_last:
                    self._opened = opened.pop_all()
        except Exception as error:
            self._write = lambda aux, final: None  # for its other slices
            what = f"{type(error).__name__}: {error}"[:_REASON_LETTERS]
            print(f"eagle31: {self._request.key} was not delivered: {what}", file=sys.stderr, flush=True)
        finally:
            self._deliveries.hold(self._outlet, -copy.num_bytes, closes=is_last)

    def _remove(self) -> None:
        with suppress(Exception), self._opened:
            raise RuntimeError("vLLM gave the prompt up")
        self._deliveries.hold(self._outlet, 0, closes=True)


def _name(destination: Mapping[str, Any]) -> str:
    return json.dumps(destination, sort_keys=True)
