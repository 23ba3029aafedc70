"""Limits on the time and the memory of a chat template, which comes with somebody else's model.

Jinja's sandbox stops what a template reads and calls, and not what it computes: `{{ 'x' * 10 ** 10 }}` takes
10 GB, and `{{ 10 ** (10 ** 10) }}` never ends. Python cannot interrupt a single operation such as these.
"""

import faulthandler
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STDERR = 2  # sys.stderr may have no file


class TooLong(Exception):
    """The error of code that has used up its time."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong once the code inside has used so many seconds of the processor.

    A process that waits or is suspended is not charged. Python can be interrupted in its main thread alone,
    and between two operations; code in another thread has no limit.
    """
    if not _in_main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _raise)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def confined(seconds: float, num_bytes: int) -> Iterator[None]:
    """Limit what single operations of the code inside take. In another thread than the main one it has none.

    Args:
        seconds: of the processor; the kernel then ends the process by SIGXCPU, and its stack is printed.
        num_bytes: that the process may take in addition; beyond them Python raises MemoryError.
    """
    if not _in_main_thread():
        yield
        return
    faulthandler.register(signal.SIGXCPU, file=_STDERR, chain=True)
    try:
        # The kernel counts whole seconds.
        with (
            _soft_limit(resource.RLIMIT_CPU, int(time.process_time() + seconds) + 1),
            _soft_limit(resource.RLIMIT_AS, _address_space() + num_bytes),
        ):
            yield
    finally:
        faulthandler.unregister(signal.SIGXCPU)


@contextmanager
def _soft_limit(kind: int, value: int) -> Iterator[None]:
    """Lower one of the process's limits."""
    before, hard = resource.getrlimit(kind)
    limits = [value, *(one for one in (before, hard) if one != resource.RLIM_INFINITY)]
    resource.setrlimit(kind, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))


def _address_space() -> int:
    """Return the bytes of memory that this process has mapped."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)  # three times as fast as `open`
    try:
        return int(os.read(descriptor, 64).split()[0]) * _PAGE_BYTES
    finally:
        os.close(descriptor)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _raise(number: int, frame: FrameType | None) -> None:
    raise TooLong
