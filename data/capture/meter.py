"""What a capture reports while it runs: tokens per server, refusals, the queue and the disk."""

import contextlib
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle31.errors import UserError

_LOOPBACK = "127.0.0.1"
_WINDOW_SECONDS = 60.0  # over which a server's rate is taken
_SNAPSHOTS = 12


class CaptureMeter(Collector):
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

    def seconds_left(self) -> float | None:
        """Return the time left at the rate so far; None before the first sample."""
        with self._lock:
            done = sum(self._tokens.values())
        if not done:
            return None
        return max(self.total_tokens - done, 0) * (self._clock() - self._started) / done

    def line(self) -> str:
        """Return the part of the progress line that the tokens in all do not say."""
        parts = [f"{_short(server)} {rate:,.0f}/s" for server, rate in self.rates().items()]
        parts += [f"{self.num_queued:,} queued", f"{self.num_refused:,} refused"]
        free = self._free_bytes()
        return ", ".join([*parts, *([f"{free / 1e9:,.1f} GB free"] if free is not None else [])])

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, for Prometheus."""
        tokens = CounterMetricFamily("eagle31_capture_tokens", "Tokens captured.", labels=["server"])
        with self._lock:
            for server, count in self._tokens.items():
                tokens.add_metric([server], count)
        yield tokens
        rates = GaugeMetricFamily(
            "eagle31_capture_tokens_per_second", "Tokens per second in the last minute.", labels=["server"]
        )
        for server, rate in self.rates().items():
            rates.add_metric([server], rate)
        yield rates
        gauges = {
            "tokens_requested": ("Tokens that this run captures.", self.total_tokens),
            "queue_samples": ("Samples that are requested and not answered.", self.num_queued),
            "refused_samples": ("Samples that were refused.", self.num_refused),
            "seconds_left": ("Time left at the rate so far.", self.seconds_left()),
            "disk_free_bytes": ("Free space where the states go.", self._free_bytes()),
        }
        for name, (documentation, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"eagle31_capture_{name}", documentation, value=value)

    def _rate(self, server: str, tokens: int, now: float) -> float:
        since, before = self._snapshots[server][0]
        return (tokens - before) / max(now - since, 1e-9)

    def _free_bytes(self) -> int | None:
        return None if self._directory is None else shutil.disk_usage(self._directory).free


@contextlib.contextmanager
def served_metrics(meter: CaptureMeter, port: int | None) -> Iterator[None]:
    """Serve a meter's metrics on a port of loopback; None serves nothing.

    Raises:
        UserError: the port is taken.
    """
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(meter)
    try:
        server, thread = start_http_server(port, _LOOPBACK, registry)
    except OSError as error:
        remedy = f"The metrics cannot be served there: {error.strerror}; choose another port."
        raise UserError("capture.metrics_port", port, remedy) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _short(server: str) -> str:
    return server.removeprefix("http://").removeprefix("https://")
