"""What a capture reports while it runs: tokens per server, refusals, the queue and the disk."""

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

_WINDOW_SECONDS = 60.0  # over which a server's rate is taken
_SNAPSHOTS = 12


class CaptureMeter:
    """Counts what a capture has done. One thread counts, and any may read.

    Args:
        total_tokens: the tokens that are to be captured.
        directory: where the states go; None where they stay in memory.
        clock: returns seconds; never goes backwards.

    Attributes:
        num_queued: the samples that are requested and not answered.
        num_refused: the samples that were refused.
    """

    def __init__(
        self, total_tokens: int, directory: Path | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total_tokens, self.num_queued, self.num_refused = total_tokens, 0, 0
        self._directory, self._clock, self._started = directory, clock, clock()
        self._tokens: dict[str, int] = {}  # by server
        self._snapshots: dict[str, deque[tuple[float, int]]] = {}  # when it had how many, by server
        self._lock = threading.Lock()

    def captured(self, server: str, num_tokens: int) -> None:
        """Count the tokens of a sample that a server has answered."""
        now = self._clock()
        with self._lock:
            tokens = self._tokens[server] = self._tokens.get(server, 0) + num_tokens
            snapshots = self._snapshots.setdefault(server, deque([(self._started, 0)]))
            if now - snapshots[-1][0] >= _WINDOW_SECONDS / _SNAPSHOTS:
                snapshots.append((now, tokens))
            while len(snapshots) > 1 and now - snapshots[0][0] > _WINDOW_SECONDS:
                snapshots.popleft()

    def rates(self) -> dict[str, float]:
        """Return the tokens per second of each server over the last minute."""
        now = self._clock()
        with self._lock:
            return {server: self._rate(server, tokens, now) for server, tokens in self._tokens.items()}

    def line(self) -> str:
        """Return the part of the progress line that the tokens in all do not say."""
        parts = [f"{_short(server)} {rate:,.0f}/s" for server, rate in self.rates().items()]
        parts += [f"{self.num_queued:,} queued", f"{self.num_refused:,} refused"]
        free = self._free_bytes()
        return ", ".join([*parts, *([f"{free / 1e9:,.1f} GB free"] if free is not None else [])])

    def _rate(self, server: str, tokens: int, now: float) -> float:
        since, before = self._snapshots[server][0]
        return (tokens - before) / max(now - since, 1e-9)

    def _free_bytes(self) -> int | None:
        return None if self._directory is None else shutil.disk_usage(self._directory).free


def _short(server: str) -> str:
    return server.removeprefix("http://").removeprefix("https://")
