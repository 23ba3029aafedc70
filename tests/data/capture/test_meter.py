"""What a capture reports about its servers, its queue and its disk."""

import io
from pathlib import Path

import pytest

from data.capture.meter import CaptureMeter
from data.progress import Progress


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
