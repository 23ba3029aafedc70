"""A limit on the processor time of code that a user's template may keep busy forever."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooLong(Exception):
    """The error of code that has used up its time."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong once the code inside has used so many seconds of the processor.

    A process that waits or is suspended is not charged. Python can be interrupted in its main thread alone;
    code in another one has no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _raise)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise TooLong
