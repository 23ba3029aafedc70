from collections.abc import Callable

import pytest

from data.progress import Progress

Run = Callable[..., list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns the lines that a stage prints to a log."""
    now = 100.0
    monkeypatch.setattr("data.progress.time.monotonic", lambda: now)

    def run(
        total: int | None, seconds: list[float], completes: bool = False, shown: bool = True
    ) -> list[str]:
        nonlocal now
        with Progress("capture", total, "tokens", shown=shown) as bar:
            for of_unit in seconds:
                now += of_unit
                bar.update()
            if completes:
                bar.complete()
        return capsys.readouterr().err.splitlines()

    return run


def test_a_log_has_a_line_after_5_seconds_then_every_30_and_one_at_the_end(run: Run) -> None:
    assert run(100, 100 * [1.0]) == [
        "capture: 5/100 tokens (5%), 1 tokens/s",
        "capture: 35/100 tokens (35%), 1 tokens/s, 1 min 05 s left",
        "capture: 65/100 tokens (65%), 1 tokens/s, 35 s left",
        "capture: 95/100 tokens (95%), 1 tokens/s, 5.0 s left",
        "capture: 100 tokens in 1 min 40 s, 1 tokens/s",
    ]


def test_the_time_left_does_not_count_a_slow_start(run: Run) -> None:
    """The first unit takes a minute, and the others a second each."""
    assert run(101, [60.0] + 100 * [1.0])[:2] == [
        "capture: 1/101 tokens (1%), 0.0167 tokens/s",
        "capture: 31/101 tokens (31%), 0.344 tokens/s, 1 min 10 s left",
    ]


def test_what_ends_before_its_total_has_stopped_unless_the_total_was_an_estimate(run: Run) -> None:
    assert run(9, 3 * [1.0]) == ["capture: stopped at 3/9 tokens in 3.0 s, 1 tokens/s"]
    assert run(9, 3 * [1.0], completes=True) == ["capture: 3 tokens in 3.0 s, 1 tokens/s"]


@pytest.mark.parametrize(("seconds", "shown"), [(9 * [0.1], True), ([], True), (3 * [60.0], False)], ids=str)
def test_a_log_is_silent(run: Run, seconds: list[float], shown: bool) -> None:
    assert run(9, seconds, shown=shown) == []
