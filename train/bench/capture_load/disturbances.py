"""What happens to the processes of the load test: kills and stops, and how long each recovery takes."""

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from train.bench.capture_load.processes import LoadClient, LoadServer

_PAUSE_SECONDS = 10.0  # for which a stopped client does not run
_SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
# Kinds in the order in which they come. The signals take turns.
_TARGETS = ("engine", "capture", "API process", "trainer", "writer")


@dataclass
class Disturbance:
    """One signal to one process."""

    kind: str  # such as "SIGKILL of an engine"
    target: str  # the name of the server or client
    began: float
    recovered: Callable[[], bool]
    seconds: float | None = None  # until the process worked again


class Disturber:
    """Disturbs one process after another, each that has recovered from the last time."""

    def __init__(self, servers: Sequence[LoadServer], clients: Sequence[LoadClient]) -> None:
        self.disturbances: list[Disturbance] = []
        self._servers, self._clients = servers, clients
        self._kinds = self._all_kinds()
        self._due = [next(self._kinds) for _ in range(len(_SIGNALS) * len(_TARGETS))]
        self._turns = dict.fromkeys(_TARGETS, 0)

    def disturb(self) -> Disturbance | None:
        """Disturb a recovered process of the first kind in turn that has one; return what was done."""
        for index, (signal_name, target) in enumerate(self._due):
            if self._disturb(signal_name, target):
                del self._due[index]
                self._due.append(next(self._kinds))
                return self.disturbances[-1]
        return None

    def look_after(self) -> None:
        """Start clients again, continue stopped ones, and note what has recovered."""
        for client in self._clients:
            client.look_after()
        for one in self.disturbances:
            if one.seconds is None and one.recovered():
                one.seconds = time.monotonic() - one.began

    @property
    def all_recovered(self) -> bool:
        return all(one.seconds is not None for one in self.disturbances)

    def table(self) -> list[dict[str, object]]:
        """Return a row for each kind: how often it happened and recovered, and how long that took."""
        rows = []
        for kind in dict.fromkeys(one.kind for one in self.disturbances):
            seconds = [one.seconds for one in self.disturbances if one.kind == kind]
            found = [one for one in seconds if one is not None]
            median = round(statistics.median(found), 1) if found else None
            rows.append(
                {"kind": kind, "times": len(seconds), "recovered": len(found), "median_seconds": median}
            )
        return rows

    def _all_kinds(self) -> Iterator[tuple[str, str]]:
        for number, target in enumerate(cycle(_TARGETS)):
            yield list(_SIGNALS)[number % len(_SIGNALS)], target  # the number of targets is odd

    def _disturb(self, signal_name: str, target: str) -> bool:
        busy = {one.target for one in self.disturbances if one.seconds is None}
        number = _SIGNALS[signal_name]
        turn = self._turns[target]
        if target in ("engine", "API process"):
            if sum(server.name in busy for server in self._servers) > 1:
                return False  # one server is left at least
            free = [one for one in self._servers if one.name not in busy and one.answers]
            if not free:
                return False
            server = free[turn % len(free)]
            self._note(signal_name, target, server.name, self._signalled(server, target, number))
        else:
            clients = [one for one in self._clients if one.kind == target and one.name not in busy]
            clients = [one for one in clients if one.running and one.begun.exists()]
            if not clients:
                return False
            client = clients[turn % len(clients)]
            self._note(signal_name, target, client.name, self._paused(client, number))
        self._turns[target] += 1
        return True

    def _signalled(self, server: LoadServer, target: str, number: signal.Signals) -> Callable[[], bool]:
        old = server.process.num_starts
        (server.signal_engine if target == "engine" else server.signal_api)(number)
        return lambda: server.process.num_starts > old and server.answers

    def _paused(self, client: LoadClient, number: signal.Signals) -> Callable[[], bool]:
        process, began = client.process_id, time.monotonic()
        os.kill(process, number)
        if number == signal.SIGKILL:
            return lambda: client.process_id != process and client.begun.exists()

        def continued() -> bool:
            if time.monotonic() - began < _PAUSE_SECONDS:
                return False
            os.kill(process, signal.SIGCONT)
            return True

        return continued

    def _note(self, signal_name: str, target: str, name: str, recovered: Callable[[], bool]) -> None:
        article = "an" if target[0] in "aeA" else "a"
        kind = (
            f"{signal_name} of {article} {target}{'' if target in ('engine', 'API process') else ' client'}"
        )
        self.disturbances.append(Disturbance(kind, name, time.monotonic(), recovered))
