"""What every way from a producer of hidden states to a trainer offers."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from data.samples import CapturedSample


@dataclass(frozen=True)
class StateRequest:
    """One sample that a trainer will need."""

    key: str  # letters, digits, - and _; unique among all that is under way in a run
    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]


class Arrivals(Protocol):
    """The trainer's side of a transport."""

    def take(self, request: StateRequest, timeout: float) -> CapturedSample | None:
        """Removes what was put; None when nothing came within `timeout` seconds."""
        ...

    def arrived(self, key: str) -> bool:
        """Whether something waits under the key."""
        ...

    def discard(self, key: str) -> None:
        """Removes what was put under the key, if anything."""
        ...


class Transport(Arrivals, Protocol):
    """Carries the states of a request from one process to another, once."""

    def put(self, request: StateRequest, aux: Tensor, last: Tensor) -> None:
        """The producer's side. aux [T, A, Ht], last [T, Ht], before the final norm."""
        ...

    def to_json(self) -> dict[str, Any]:
        """From which a producer's process opens its end."""
        ...


class Producer(Protocol):
    """Whatever runs the target for online training."""

    @property
    def num_restarts(self) -> int:
        """How often it was started again, or had to connect again."""
        ...

    def request(self, request: StateRequest) -> None:
        """Asks for a sample and returns at once; the states arrive by the transport."""
        ...

    def refusals(self) -> dict[str, str]:
        """Requests since the last call that will never be answered, by key, with the reason.

        Restarts or reconnects what has died, and asks again for what it still owed.

        Raises:
            UserError: it cannot go on; says why.
        """
        ...

    def close(self) -> None: ...
