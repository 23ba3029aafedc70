"""What a capture reports about its servers, its queue and its disk."""

import io
import socket
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from data.capture.meter import CaptureMeter, served_metrics
from data.progress import Progress
from eagle31.errors import UserError
from tests.processes import listening


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(tmp_path: Path, clock: Clock) -> CaptureMeter:
    """A capture after ten minutes, one of whose servers has been three times as fast in the last one."""
    meter = CaptureMeter(total_tokens=1_000_000, directory=tmp_path, clock=clock)
    for second in range(600):
        clock.now = float(second + 1)
        meter.captured("http://one:8000", 100 if second < 500 else 300)
        meter.captured("http://two:8000", 200)
    meter.num_queued, meter.num_refused = 64, 3
    return meter


def test_one_line_says_what_each_server_does_and_what_is_left(meter: CaptureMeter, clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("capture", 1_000_000, "tokens", stream=stream, clock=clock) as bar:
        bar.note(meter.line)
        clock.now += 10
        bar.update(200_000)
    line = stream.getvalue().splitlines()[0]
    assert line.startswith("capture: 200,000/1,000,000 tokens (20%), 20,000 tokens/s, 40 s left, one:8000 ")
    rates = meter.rates()
    assert rates["http://one:8000"] == pytest.approx(300, rel=0.2)
    assert rates["http://two:8000"] == pytest.approx(200, rel=0.2)
    assert "two:8000" in line
    assert "64 queued, 3 refused" in line
    assert line.endswith("GB free")


def test_prometheus_reads_the_same_numbers_on_loopback_only(meter: CaptureMeter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=r"capture\.metrics_port=.*choose another port"):
            served_metrics(meter, port).__enter__()
    with served_metrics(meter, port):
        assert [address for address, own in listening(psutil.Process()) if own == port] == ["127.0.0.1"]
        text = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['eagle31_capture_tokens_total{server="http://one:8000"}']) == 80_000
    assert float(lines["eagle31_capture_tokens_requested"]) == 1_000_000
    assert float(lines["eagle31_capture_queue_samples"]) == 64
    assert float(lines["eagle31_capture_refused_samples"]) == 3
    assert float(lines["eagle31_capture_seconds_left"]) == pytest.approx(600 * 80 / 20, rel=1e-6)
    assert float(lines["eagle31_capture_disk_free_bytes"]) > 0
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics")
