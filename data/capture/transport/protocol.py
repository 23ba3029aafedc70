"""The interfaces of transports and of producers of hidden states."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from data.samples import CapturedSample


@dataclass(frozen=True)
class StateRequest:
    """A trainer's request for the states of one sample."""

    key: str  # letters, digits, - and _; unique among the requests of a run
    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]


class Transport(Protocol):
    """Carries the states of a request from an engine to a trainer, once: the trainer's side."""

    def take(self, request: StateRequest, timeout: float) -> CapturedSample | None:
        """Remove and return a sample; None where it did not come within `timeout` seconds."""
        ...

    def arrived(self, key: str) -> bool:
        """Return whether a sample waits under the key."""
        ...

    def discard(self, key: str) -> None:
        """Remove the key's sample, if there is one."""
        ...


class Producer(Protocol):
    """Has engines run the target and put its states into a transport."""

    @property
    def num_restarts(self) -> int:
        """The number of times that it was started again or had to reconnect."""
        ...

    def request(self, request: StateRequest) -> bool:
        """Request a sample and return at once; the states arrive through the transport.

        Returns:
            False where it has been requested before and is not answered yet, so that nothing is done.
        """
        ...

    def answered(self, key: str) -> bool:
        """Return whether the engine has answered the request, so that its states are on their way."""
        ...

    def received(self, key: str) -> None:
        """Note that the trainer has taken a sample, so that it is not delivered again."""
        ...

    def refusals(self) -> dict[str, str]:
        """Return the requests that were refused since the last call: the reasons by key.

        Raises:
            UserError: it cannot continue.
        """
        ...

    def close(self) -> None: ...
