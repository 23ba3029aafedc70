"""Stopping a run before it is finished: a signal or the time limit asks for it, and training saves first.

Training looks after each step whether a rank is to stop. Everywhere else a signal has its default action: the
run dies, and the same command resumes.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from eagle31.json_files import write_json

STOPPED = 75  # EX_TEMPFAIL in sysexits.h: the same command succeeds later
# In the output directory. torchrun's own status is 1 whatever that of its processes is.
STOPPED_FILE = "stopped.json"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Of the time that a Slurm job has left, the part that is kept for saving, and the longest such time.
_SAVING_FRACTION, _SAVING_SECONDS = 0.1, 120.0


class Stopped(SystemExit):
    """Raised on all ranks once a checkpoint is saved. The same command resumes after it.

    Args:
        reason: why this rank stops; None: another rank was asked to.
    """

    def __init__(self, step: int, reason: str | None) -> None:
        super().__init__(STOPPED)
        self.step, self.reason = step, reason

    def write(self, output_dir: Path) -> None:
        """Write the file that says that the run has stopped."""
        write_json(output_dir / STOPPED_FILE, {"reason": self.reason or "another rank", "step": self.step})


@contextmanager
def stop_reasons(stop_at: float | None) -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns why this process is to stop, or None; signals do nothing else meanwhile.

    Args:
        stop_at: the time limit, in seconds since the epoch.
    """
    received: list[str] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number).name)

    def reason() -> str | None:
        if received:
            return received[0]
        return "the time limit" if stop_at is not None and time.time() >= stop_at else None

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield reason
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def time_limit(run_minutes: float | None, environment: Mapping[str, str], started: float) -> float | None:
    """Return when a run is to stop, in seconds since the epoch; None if it has no limit.

    Args:
        run_minutes: the run's limit, if it has one. Otherwise a Slurm job's end is, but for the time to save.
        started: when the run started, in seconds since the epoch.
    """
    if run_minutes is not None:
        return started + 60 * run_minutes
    end = environment.get("SLURM_JOB_END_TIME", "")
    if not end.isdigit():
        return None
    return int(end) - min(_SAVING_SECONDS, _SAVING_FRACTION * max(0.0, int(end) - started))
