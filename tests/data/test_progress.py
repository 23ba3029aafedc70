import io

import pytest

from data.progress import Progress


class Clock:
    """Returns the time that the test has set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(
    total: int | None, seconds_per_unit: float, units: int, completes: bool = False, **options: object
) -> list[str]:
    """Returns the lines that a stage prints to a log."""
    clock, stream = Clock(), io.StringIO()
    bar = Progress("capture", total, "tokens", stream=stream, clock=clock, **options)  # type: ignore[arg-type]
    with bar:
        for _ in range(units):
            clock.now += seconds_per_unit
            bar.update()
        if completes:
            bar.complete()
    return stream.getvalue().splitlines()


def test_a_log_has_a_line_after_5_seconds_then_every_30_and_one_at_the_end() -> None:
    assert run(100, 1.0, 100) == [
        "capture: 5/100 tokens (5%), 1 tokens/s, 1 min 35 s left",
        "capture: 35/100 tokens (35%), 1 tokens/s, 1 min 05 s left",
        "capture: 65/100 tokens (65%), 1 tokens/s, 35 s left",
        "capture: 95/100 tokens (95%), 1 tokens/s, 5.0 s left",
        "capture: 100 tokens in 1 min 40 s, 1 tokens/s",
    ]


def test_what_ends_before_its_total_has_stopped_unless_the_total_was_an_estimate() -> None:
    assert run(9, 1.0, 3) == ["capture: stopped at 3/9 tokens in 3.0 s, 1 tokens/s"]
    assert run(9, 1.0, 3, completes=True) == ["capture: 3 tokens in 3.0 s, 1 tokens/s"]


@pytest.mark.parametrize(
    ("seconds", "units", "shown"), [(0.1, 9, True), (60.0, 0, True), (60.0, 3, False)], ids=str
)
def test_a_log_is_silent(seconds: float, units: int, shown: bool) -> None:
    assert run(9, seconds, units, shown=shown) == []
