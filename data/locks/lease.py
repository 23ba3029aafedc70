"""A lock without flock: a lease, which its holder renews.

A lease is a file with a number that its holder increases every few seconds. Whoever finds the same content
for long enough, by its own clock, takes the lease over; clocks of different nodes are never compared. Taking
over creates the file of the next generation with O_EXCL, which one process alone can do, and the holder of
the highest generation has the lock: one that wakes up too late finds the higher one and stops.
"""

import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.locks.lock import Lock
from data.processes.identity import Identity
from eagle31.errors import UserError

_LEASES = ".leases"
_RELEASED = "released"


@dataclass(frozen=True)
class LeaseTimes:
    """Times of a lease, in seconds.

    A holder that was stopped for longer than `sure` looks whether it still has the lease before it continues,
    and a new holder waits for `grace`, in which one that looked just before is seen.
    """

    renew: float = 5.0
    sure: float = 15.0
    expire: float = 60.0
    grace: float = 1.0
    poll: float = 0.5


class _Lease(Lock):
    """The file of a generation, whose content a thread changes until the lock is closed."""

    def __init__(
        self,
        path: Path,
        generation: int,
        content: "_Content",
        times: LeaseTimes,
        on_lost: Callable[[], None] | None,
    ) -> None:
        self._path, self._generation, self._times = path, generation, times
        self._content, self._on_lost = content, on_lost
        self._lost = False
        self._renewed = time.monotonic()
        self._guard = threading.Lock()  # of renewing
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease-{path.name}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if not self._lost and time.monotonic() - self._renewed > self._times.sure:
            self._renew()
        if self._lost:
            remedy = (
                "Another process has taken over this lease, as it was not renewed for a long time; run again."
            )
            raise UserError("lock", self._path, remedy)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        with self._guard:
            if not self._lost and not self.closed:
                # The file stays, so that generations are never counted again from the beginning.
                with suppress(OSError):
                    _file_of(self._path, self._generation).write_text(f"{_RELEASED}\n")
            self.closed = True

    def _run(self) -> None:
        while not self._ending.wait(self._times.renew):
            # A file server that does not answer for a while is no reason to end: `check` decides.
            with suppress(OSError):
                self._renew()
            if self._lost:
                if self._on_lost is not None:
                    self._on_lost()
                return

    def _renew(self) -> None:
        with self._guard:
            if self._lost or self.closed:
                return
            started = time.monotonic()
            self._content.count += 1
            _write(_file_of(self._path, self._generation), str(self._content))
            if max(_generations(self._path)) > self._generation:
                self._lost = True
            self._renewed = started


@dataclass
class _Content:
    """What the file of a generation says: its holder, and how often it was renewed."""

    owner: str
    machine: str
    process: str
    count: int = 0

    def __str__(self) -> str:
        return f"{self.owner} {self.machine} {self.process} {self.count}\n"


def take_lease(path: Path, wait: bool, times: LeaseTimes, on_lost: Callable[[], None] | None) -> Lock | None:
    last = max(_generations(path), default=0)
    if last and not _is_free(path, last, wait, times):
        return None
    before = _read(path, last) if last else None
    holder = Identity.of(os.getpid())
    content = _Content(uuid.uuid4().hex, holder.machine, holder.process)
    new = _file_of(path, last + 1)
    try:
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return None
    with os.fdopen(descriptor, "w") as file:
        file.write(str(content))
        file.flush()
        os.fsync(file.fileno())
    if last and before != f"{_RELEASED}\n":
        time.sleep(times.grace)
    if max(_generations(path)) > last + 1 or (last and _read(path, last) != before):
        # Another one was faster, or the holder has renewed its lease after all.
        new.write_text(f"{_RELEASED}\n")
        return None
    for generation in _generations(path):
        if generation <= last:
            _file_of(path, generation).unlink(missing_ok=True)
    return _Lease(path, last + 1, content, times, on_lost)


def _is_free(path: Path, generation: int, wait: bool, times: LeaseTimes) -> bool:
    """Return whether nobody holds a generation: it was released, stays the same, or has no process."""
    first, started, announced = _read(path, generation), time.monotonic(), False
    while True:
        found = _read(path, generation)
        if found == f"{_RELEASED}\n" or (found is not None and _has_ended(found)):
            return True
        if found is None or found != first or not wait:
            return False
        waited = time.monotonic() - started
        if waited > times.expire:
            return True
        if waited > 2 * times.renew and not announced:
            announced = True
            what = "a process on another node that may have ended"
            print(f"locks: {path} is held by {what}; waiting up to {times.expire:.0f} s", file=sys.stderr)
        time.sleep(times.poll)


def _has_ended(content: str) -> bool:
    """Return whether the holder was a process of this machine that no longer exists."""
    fields = content.split()
    holder = Identity.from_json({"machine": fields[1], "process": fields[2]}) if len(fields) == 4 else None
    return holder is not None and holder.has_ended


def _file_of(path: Path, generation: int) -> Path:
    # In a directory of their own, because every renewal lists it.
    return path.parent / _LEASES / f"{path.name}-{generation:06d}"


def _generations(path: Path) -> list[int]:
    directory, start = path.parent / _LEASES, re.compile(rf"{re.escape(path.name)}-(\d{{6,}})")
    directory.mkdir(exist_ok=True)
    return [int(found[1]) for found in map(start.fullmatch, os.listdir(directory)) if found]


def _read(path: Path, generation: int) -> str | None:
    try:
        return _file_of(path, generation).read_text()
    except FileNotFoundError:
        return None


def _write(path: Path, content: str) -> None:
    """Write a file that exists; one that was removed belongs to an earlier generation."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
