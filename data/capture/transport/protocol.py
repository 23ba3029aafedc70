"""The interface of transports of hidden states, on the trainer's side."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from data.samples import CapturedSample, StateShape


@dataclass(frozen=True)
class StateRequest:
    """A trainer's request for the states of one sample."""

    key: str  # letters, digits, - and _; unique among the requests of a run
    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]


class Transport(Protocol):
    """Brings the states of a request from an engine, once."""

    def take(self, request: StateRequest, timeout: float) -> CapturedSample | None:
        """Remove and return a sample; None where it did not come within `timeout` seconds."""
        ...

    def arrived(self, key: str) -> bool:
        """Return whether a sample waits under the key."""
        ...

    def discard(self, key: str) -> None:
        """Remove the key's sample, if there is one."""
        ...


@dataclass(frozen=True)
class OpenTransport:
    """A transport, and the form in which it delivers the target's states.

    sample_bytes: returns the most bytes that a sample takes on the way, from loss_mask bool [T].
    task: returns what an engine needs for a request besides its key and tokens.
    """

    transport: Transport
    shape: StateShape
    sample_bytes: Callable[[Tensor], int]
    task: Callable[[StateRequest], Any]
