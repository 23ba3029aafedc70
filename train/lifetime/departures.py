"""Notices that a rank has ended before the run has: no other rank can continue without it.

torchrun then asks the other ranks of its node to stop, as if a user had asked, and kills them after 30 s. On
other nodes it notices nothing. So every rank looks itself whether the processes of its node are there, and
what it finds reaches all nodes through the store of the run.
"""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from data.processes.identity import Identity

_PERIOD_SECONDS = 1.0
_GRACE_SECONDS = 10.0  # for a rank to end by itself
_DEPARTED = "departures/found"


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, as another process of its node finds it."""

    host: str
    node: int
    process: int
    identity: Identity


class Departures:
    """Looks for ranks that have ended before they have left the run. Use it as a context manager.

    A rank that does not end within seconds after that, because it waits for the one that has ended, is ended.

    Args:
        store: a connection to the store of the run.
        node: the number of this rank's torchrun.
        fail: called with the message before this process is ended; returns its status.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, node: int, *, fail: Callable[[str], int]
    ) -> None:
        self._store, self._rank, self._node, self._fail = store, rank, node, fail
        self._unknown = set(range(size)) - {rank}
        self._here: dict[int, RankProcess] = {}  # the other ranks of this node
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="departures", daemon=True)

    def __enter__(self) -> "Departures":
        process = os.getpid()
        own = RankProcess(socket.gethostname(), self._node, process, Identity.of(process))
        self._store.set(_process_name(self._rank), json.dumps(asdict(own)))
        if self._unknown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # torchrun, which serves the store, may end before this rank does.
        with contextlib.suppress(RuntimeError):
            self._store.set(_left_name(self._rank), "")
        self._ending.set()

    def report_failure(self) -> None:
        """Say that this rank ends with an error."""
        self._report(f"rank {self._rank} has failed")

    def found(self) -> str | None:
        """Return which rank has failed, or has ended before it left the run; None: no rank has."""
        with self._lock:
            if not self._store.check([_DEPARTED]):
                ended = self._ended_here()
                if ended is None:
                    return None
                process = self._here[ended]
                self._report(f"rank {ended} (process {process.process} on {process.host}) has ended")
        return self._store.get(_DEPARTED).decode()

    def _ended_here(self) -> int | None:
        for rank in sorted(self._unknown):
            if self._store.check([_process_name(rank)]):
                self._unknown.remove(rank)
                raw = json.loads(self._store.get(_process_name(rank)))
                other = RankProcess(**raw | {"identity": Identity(**raw["identity"])})
                if other.node == self._node:
                    self._here[rank] = other
        for rank, other in list(self._here.items()):
            if other.identity.has_ended:
                # In this order: a rank leaves before it ends.
                if not self._store.check([_left_name(rank)]):
                    return rank
                del self._here[rank]
        return None

    def _report(self, what: str) -> None:
        self._store.compare_set(_DEPARTED, "", what)  # The first one is the cause of the others.

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):
            while (found := self.found()) is None:
                if self._ending.wait(_PERIOD_SECONDS):
                    return
            if not self._ending.wait(_GRACE_SECONDS):
                self._end(found)

    def _end(self, found: str) -> None:
        message = f"{found}; rank {self._rank} waits for it in vain, and ends"
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(self._fail(message))


def _process_name(rank: int) -> str:
    return f"departures/process/{rank}"


def _left_name(rank: int) -> str:
    return f"departures/left/{rank}"
