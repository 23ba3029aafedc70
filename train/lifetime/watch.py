"""Finds the rank for which the others wait in vain, and ends the run with its name.

A thread of every rank writes to the store of the run what the rank is doing and how many collective
operations it has begun. Two ranks compare these. A rank hangs if for `limit_seconds` it has begun fewer
operations than another and stays where it is, or its thread writes nothing. All hang if all have begun as
many, and stay in the functions of torch.distributed in which they are.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train.lifetime.activity import ACTIVITY, main_frames, operation_in, shown

_PERIODS = 20  # beats within the limit
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.1, 2.0  # between two beats
_SILENT_PERIODS = 4  # without a beat
_WARNING_FRACTION = 0.25  # of the limit, after which a rank is named for the first time
_TOGETHER_SECONDS = 10.0  # until every rank that answers has written its stacks
_STOP, _HUNG, _TOLD = "watch/stop", "watch/hung", "watch/told"


@dataclass
class Beat:
    """What a rank says of itself."""

    number: int
    stage: str
    activity: str
    waits_for: str | None
    operations: int  # collective operations that it has begun
    stack: str
    process: int
    host: str
    ended: bool = False
    operation: str | None = None  # the collective operation that it waits for

    @property
    def who(self) -> str:
        return f"process {self.process} on {self.host}"


class Seen:
    """The last beat of a rank, and since when parts of it are what they are, by this process's clock."""

    def __init__(self, now: float) -> None:
        self.beat: Beat | None = None
        self.beaten = self.advanced = self.moved = now
        self.next_warning = 0.0

    def update(self, beat: Beat, now: float) -> None:
        before, self.beat = self.beat, beat
        if before is None or beat.number != before.number:
            self.beaten = now
        if before is None or (beat.activity, beat.operations) != (before.activity, before.operations):
            self.advanced = now
        if before is None or (beat.activity, beat.operations, beat.stack) != (
            before.activity,
            before.operations,
            before.stack,
        ):
            self.moved = now

    def forgive(self, seconds: float) -> None:
        """Leave out a time in which this process itself did not run, and perhaps no other did."""
        self.beaten += seconds
        self.advanced += seconds
        self.moved += seconds


@dataclass(frozen=True)
class Finding:
    """A rank that hangs or may hang."""

    rank: int
    seconds: float
    what: str  # completes "rank 1 ..."
    ends_run: bool  # once the limit is over


class RankWatch:
    """The thread of one rank. Use it as a context manager.

    Args:
        store: a connection that nothing else uses, so that no other thread's request delays a beat.
        limit_seconds: how long a rank may hold up the others.
        directory: where the ranks write their stacks when one hangs.
        stop: called with the reason once another rank is asked to stop.
        fail: called with the message when a rank hangs; then this process ends with its status.
        printed: writes one line.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        limit_seconds: float,
        directory: Path,
        stop: Callable[[str], None],
        fail: Callable[[str], int],
        printed: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._limit, self._directory = limit_seconds, directory
        self._stop, self._fail, self._printed = stop, fail, printed
        self._period = min(max(limit_seconds / _PERIODS, _SHORTEST_SECONDS), _LONGEST_SECONDS)
        self._number = 0
        self._stop_seen = False
        self._ending = threading.Event()
        # Two, because one of them may be the one that hangs.
        self._looked = time.monotonic()
        self._seen = [Seen(self._looked) for _ in range(size)] if rank in (0, size - 1) else []
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def __enter__(self) -> "RankWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(_LONGEST_SECONDS)

    def tell_stop(self, reason: str) -> None:
        """Have the other ranks stop, too. Any thread may call."""
        self._stop_seen = True
        with contextlib.suppress(RuntimeError):
            self._store.set(_STOP, reason)

    def _run(self) -> None:
        # torchrun, which serves the store, may end before this rank does.
        with contextlib.suppress(RuntimeError):
            while not self._ending.wait(self._period):
                self._beat()
                if not self._stop_seen and self._store.check([_STOP]):
                    self._stop_seen = True
                    self._stop(self._store.get(_STOP).decode())
                if self._seen:
                    self._look()
                if self._store.check([_HUNG]):
                    self._end(self._store.get(_HUNG).decode())
            self._beat(ended=True)

    def _beat(self, *, ended: bool = False) -> None:
        self._number += 1
        frames = main_frames()
        beat = Beat(
            self._number,
            ACTIVITY.stage,
            str(ACTIVITY),
            ACTIVITY.waits_for,
            begun_operations(),
            shown(frames),
            os.getpid(),
            socket.gethostname(),
            ended,
            operation_in(frames),
        )
        self._store.set(_name(self._rank), json.dumps(vars(beat)))

    def _look(self) -> None:
        now = time.monotonic()
        missed, self._looked = now - self._looked - self._period, now
        if missed > self._period:  # Slurm may have suspended the job.
            for seen in self._seen:
                seen.forgive(missed)
        names = [_name(rank) for rank in range(self._size)]
        # A request for a value that is not there yet would wait for it.
        if not self._store.check(names):
            names = [name for name in names if self._store.check([name])]
        for name, content in zip(names, self._store.multi_get(names), strict=True):
            self._seen[_rank_of(name)].update(Beat(**json.loads(content)), now)
        for finding in find(self._seen, now, _SILENT_PERIODS * self._period):
            seen = self._seen[finding.rank]
            if finding.ends_run and finding.seconds > self._limit:
                self._store.set(_HUNG, f"{self._rank} {self._described(finding)}")
                return
            if finding.seconds > max(self._limit * _WARNING_FRACTION, seen.next_warning) and self._rank == 0:
                seen.next_warning = 2 * finding.seconds
                # Without a collective operation a rank may be at work for hours.
                kind = "warning" if finding.ends_run else "note"
                self._printed(f"{kind}: {self._described(finding)}")

    def _described(self, finding: Finding) -> str:
        beat = self._seen[finding.rank].beat
        if beat is None:
            return f"rank {finding.rank} {finding.what} for {finding.seconds:.0f} s"
        who = f"rank {finding.rank} ({beat.who}{_state(beat)})"
        what = f"{finding.what} for {finding.seconds:.0f} s, in {beat.activity}"
        return f"{who} {what}; last seen at\n{beat.stack}"

    def _end(self, found: str) -> None:
        finder, _, what = found.partition(" ")
        directory = self._directory / "hung"
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            with open(directory / f"rank-{self._rank}.txt", "w") as file:
                print(f"{ACTIVITY}\n{what}\n", file=file, flush=True)
                faulthandler.dump_traceback(file)
        message = f"{what[0].upper()}{what[1:]}\nEvery rank that answers writes its stacks to {directory}."
        if int(finder) == self._rank:
            self._printed(f"error: {message}")
        status, deadline = self._fail(message), time.monotonic() + _TOGETHER_SECONDS
        # Once a rank ends, torchrun ends the others.
        self._store.add(_TOLD, 1)
        while self._store.add(_TOLD, 0) < self._size and time.monotonic() < deadline:
            time.sleep(_SHORTEST_SECONDS)
        os._exit(status)


def find(seen: Sequence[Seen], now: float, silence: float) -> list[Finding]:
    """Return the ranks for which others may wait in vain, the longest waits first.

    Args:
        silence: seconds without a beat after which a rank counts as silent.
    """
    beats = [one.beat for one in seen if one.beat is not None and not one.beat.ended]
    most = max((beat.operations for beat in beats), default=0)
    waited_for = any(beat.waits_for for beat in beats)
    found = []
    for rank, one in enumerate(seen):
        beat, silent = one.beat, now - one.beaten
        if beat is None:
            found.append(Finding(rank, silent, "has not started", ends_run=False))
        elif beat.ended:
            continue
        elif silent > silence:
            found.append(Finding(rank, silent, "has not answered", ends_run=True))
        elif beat.operations < most:
            found.append(Finding(rank, now - one.advanced, "has held up the other ranks", ends_run=True))
        elif waited_for and not beat.waits_for:
            found.append(Finding(rank, now - one.moved, "has not moved while others wait", ends_run=False))
    if not found and len(beats) == len(seen) > 1 and all(beat.operation for beat in beats):
        rank = max(range(len(seen)), key=lambda number: seen[number].moved)
        what = f"waits in {beats[rank].operation}, as all other ranks wait in an operation,"
        found.append(Finding(rank, now - seen[rank].moved, what, ends_run=True))
    return sorted(found, key=lambda one: -one.seconds)


def begun_operations() -> int:
    """Return how many collective operations this process has begun, over all process groups."""
    if not dist.is_initialized():
        return 0
    groups: Sequence[Any] = list(dist.distributed_c10d._world.pg_map)
    try:
        return sum(group._get_sequence_number_for_group() for group in groups)
    except RuntimeError:  # The main thread has just destroyed them.
        return 0


def _name(rank: int) -> str:
    return f"watch/beat/{rank}"


def _rank_of(name: str) -> int:
    return int(name.rpartition("/")[2])


def _state(beat: Beat) -> str:
    """Return what the kernel says of a process of this host that does not run."""
    if beat.host != socket.gethostname():
        return ""
    try:
        state = Path(f"/proc/{beat.process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ", which has ended"
    kernel = {"T": ", which is stopped", "t": ", which is being traced", "Z": ", which has ended"}
    return kernel.get(state, ", which waits for a disk or a device" if state == "D" else "")
