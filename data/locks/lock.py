"""What a lock can do, whichever way it locks others out."""

from abc import ABC, abstractmethod
from types import TracebackType


class Lock(ABC):
    """A lock that this process holds until `close`, or until it ends."""

    closed = False

    @abstractmethod
    def check(self) -> None:
        """Raise UserError if another process has the lock by now."""

    @abstractmethod
    def close(self) -> None:
        """Release the lock. A closed lock may be closed again."""

    def __enter__(self) -> "Lock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
