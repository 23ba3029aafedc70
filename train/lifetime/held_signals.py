"""Signals that come before a run can act on them, while Python imports what the run needs.

Their default action would end the process with another status than that of a run that was stopped, and
without the file that says so. This module imports the standard library alone, because it comes first.
"""

import os
import signal
import time
from types import FrameType

from train.lifetime.stops import SAME_EVENT_SECONDS, SIGNALS

_held: list[tuple[float, int]] = []  # when each came
_released = False


def hold_signals() -> None:
    """Keep signals that stop a run until `release_signals`. A second one ends the process at once."""
    for number in SIGNALS:
        signal.signal(number, _hold)


def release_signals() -> None:
    """Act on what was held: the handlers that are installed now get the first signal."""
    global _released
    _released = True
    if _held:
        signal.raise_signal(_held[0][1])


def _hold(number: int, _: FrameType | None) -> None:
    if _released:  # The run has ended, and its handlers are not installed any more.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    _held.append((time.monotonic(), number))
    if _held[-1][0] - _held[0][0] > SAME_EVENT_SECONDS:
        os._exit(128 + number)
