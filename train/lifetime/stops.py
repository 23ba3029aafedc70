"""Requests to stop a run before it is finished: signals, and the time limit.

A request raises `Stopped` in the main thread, wherever that is: every stage can be interrupted and resumes.
Within `at_safe_points` the main thread asks instead, so that a training ends after a step, with a checkpoint.
A second signal ends the process at once.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

STOPPED = 75  # EX_TEMPFAIL in sysexits.h: the same command succeeds later
STOPPED_FILE = "stopped.json"  # in the output directory: why the run stopped

SIGNALS = (signal.Signals.SIGTERM, signal.Signals.SIGUSR1, signal.Signals.SIGUSR2)
_INTERRUPT = signal.Signals.SIGURG  # has a thread interrupt the main thread; by default a process ignores it
# One event can reach a rank twice: Slurm signals every process, and torchrun forwards what it receives.
SAME_EVENT_SECONDS = 5.0
# `Stopped` is lost where nothing carries an exception on: in `__del__`, or in a callback at a fork.
_AGAIN_SECONDS = 1.0
# Of the time that a Slurm job has left, the part that is kept for saving, and the longest such time.
_SAVING_FRACTION, _SAVING_SECONDS = 0.1, 120.0


class Stopped(SystemExit):
    """Raised when a run is to stop before it is finished. The same command resumes it."""

    def __init__(self) -> None:
        super().__init__(STOPPED)


class StopRequests:
    """The requests that reach this process.

    Args:
        seconds_left: time until the run is to stop; None: it has no limit.
        announced: whether requests are printed.
    """

    def __init__(self, seconds_left: float | None, announced: bool) -> None:
        self.on_request: Callable[[str], None] = lambda reason: None  # called in a thread, once
        self._deadline = None if seconds_left is None else time.monotonic() + seconds_left
        self._announced = announced
        self._requests: list[tuple[float, str]] = []
        self._deferred = self._raised = False
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._watch, name="stop-requests", daemon=True)

    @property
    def reason(self) -> str | None:
        """Why the run is to stop; None: it is not."""
        return self._requests[0][1] if self._requests else None

    def request(self, reason: str) -> None:
        """Have the run stop. Any thread may call."""
        self._note(reason)
        self._interrupt()

    @contextmanager
    def deferred(self) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns whether the run is to stop; nothing is raised until the end."""
        self._deferred = True
        try:
            yield lambda: bool(self._requests)
        except Stopped:
            self._raised = True
            raise
        finally:
            self._deferred = False
        self._raise_if_requested()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals and the time limit. Only the main thread may enter."""
        before = {number: signal.signal(number, self._handle) for number in (*SIGNALS, _INTERRUPT)}
        descriptor = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.write(self._wake, b"\0")  # no signal: the thread ends
            self._thread.join()
            os.close(self._wake)
            os.close(self._woken)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self._requests:
            self._note(signal.Signals(number).name)
        self._raise_if_requested()

    def _raise_if_requested(self) -> None:
        if self._requests and not self._deferred and not (self._raised and _is_stopping()):
            self._raised = True
            raise Stopped

    @staticmethod
    def _interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)

    def _note(self, reason: str) -> None:
        self._requests.append((time.monotonic(), reason))

    def _watch(self) -> None:
        # In a thread, because a handler waits until the main thread returns from a collective operation.
        reported = False
        while True:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready = select.select([self._woken], [], [], _AGAIN_SECONDS if self._requests else left)[0]
            if not ready and not self._requests:
                self._deadline = None
                self.request("the time limit")
            elif not ready and not self._deferred:
                self._interrupt()
            for number in os.read(self._woken, 64) if ready else b"":
                if number == 0:
                    return
                if number in SIGNALS:
                    self._note(signal.Signals(number).name)
                    if self._requests[-1][0] - self._requests[0][0] > SAME_EVENT_SECONDS:
                        self._end_at_once(number)
            if self._requests and not reported:
                reported = True
                self._report(self._requests[0][1])

    def _report(self, reason: str) -> None:
        if self._announced:
            print(f"stop: {reason}; a second signal ends the run at once", file=sys.stderr, flush=True)
        self.on_request(reason)

    def _end_at_once(self, number: int) -> None:
        print(f"stop: {signal.Signals(number).name} again; nothing is saved", file=sys.stderr, flush=True)
        os._exit(128 + number)


def _is_stopping() -> bool:
    """Return whether the main thread cleans up after `Stopped`. Only the main thread may call."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    return error is not None


_installed: StopRequests | None = None


@contextmanager
def stop_requests(seconds_left: float | None, *, announced: bool) -> Iterator[StopRequests]:
    """Have signals and the time limit stop this process; see `StopRequests` for the arguments."""
    global _installed
    requests = StopRequests(seconds_left, announced)
    _installed = requests
    try:
        with requests.installed():
            yield requests
    finally:
        _installed = None


@contextmanager
def at_safe_points() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the run is to stop; until the end no request raises `Stopped`.

    Whoever finds that the run is to stop raises it. Without `stop_requests` there are no requests.
    """
    if _installed is None:
        yield lambda: False
    else:
        with _installed.deferred() as requested:
            yield requested


@contextmanager
def stop_not_replaced() -> Iterator[None]:
    """Raise `Stopped` again where a library, which it has interrupted, raises an error while it cleans up."""
    try:
        yield
    except Exception as error:
        one: BaseException | None = error
        while one is not None:
            if isinstance(one, Stopped):
                raise Stopped from error
            one = one.__context__
        raise


def seconds_left(run_minutes: float | None, environment: Mapping[str, str], now: float) -> float | None:
    """Return the time until a run that starts now is to stop; None if it has no limit.

    Args:
        run_minutes: the run's limit, if it has one. Otherwise a Slurm job's end is, but for the time to save.
        now: seconds since the epoch.
    """
    if run_minutes is not None:
        return 60 * run_minutes
    end = environment.get("SLURM_JOB_END_TIME", "")
    if not end.isdigit():
        return None
    left = max(0.0, int(end) - now)
    return left - min(_SAVING_SECONDS, _SAVING_FRACTION * left)


# The signals of a forked process, such as one that reads data, are not for the run. Until it has the default
# handlers, none may arrive.
def _before_fork() -> None:
    if _installed is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork_in_parent() -> None:
    if _installed is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _after_fork_in_child() -> None:
    if _installed is not None:
        signal.set_wakeup_fd(-1)
        for number in (*SIGNALS, _INTERRUPT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
