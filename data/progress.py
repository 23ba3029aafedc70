"""Progress of a long stage: a bar on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

SHORTEST_SECONDS = 1.0  # a stage that ends sooner prints nothing
FIRST_LINE_SECONDS = 5.0  # soon enough to show that the stage works
LINE_SECONDS = 30.0
STALL_SECONDS = 900.0  # whatever has work and shows no progress for this long counts as hung

Item = TypeVar("Item")


class Progress:
    """Reports how far a stage has come, how fast it is, and the time left, on stderr.

    On a terminal this is a tqdm bar. Elsewhere it is a line after 5 seconds, a line every 30 seconds, and one
    at the end unless the stage took less than a second, so that a batch log is neither silent nor full of
    control characters. The time left is reported from the second line on, by the rate since the first: until
    then an engine may have compiled, or hundreds of answers have begun of which none is finished.

    Use it as a context manager.

    Args:
        description: names the stage at the beginning of each line.
        total: how many units there are; None where nobody knows.
        unit: names what is counted, in the plural.
        initial: how many of them an earlier run has finished.
        shown: False reports nothing; every rank but 0 passes that.
    """

    def __init__(
        self,
        description: str,
        total: int | None,
        unit: str,
        *,
        initial: int = 0,
        shown: bool = True,
    ) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._initial = self._done = initial
        self._note: str | Callable[[], str] = ""
        self._started = time.monotonic()
        self._next_line = self._started + FIRST_LINE_SECONDS
        self._first_line: tuple[float, int] | None = None  # when it was printed, and this run's units then
        on_terminal = sys.stderr.isatty()
        self._prints_lines = shown and not on_terminal
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc=description,
            unit=f" {unit}",
            unit_scale=True,
            disable=not (shown and on_terminal),
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        seconds = time.monotonic() - self._started
        if self._prints_lines and self._done > self._initial and seconds >= SHORTEST_SECONDS:
            finished = self._total is None or self._done >= self._total
            counts = f"{self._done:,}" if finished else f"stopped at {self._done:,}/{self._total:,}"
            self._print(f"{counts} {self._unit} in {format_seconds(seconds)}", self._shown_rate())

    def update(self, count: int = 1) -> None:
        """Adds `count` finished units."""
        self._done += count
        self._bar.update(count)
        if self._prints_lines and (now := time.monotonic()) >= self._next_line:
            self._next_line = now + LINE_SECONDS
            counts, left = f"{self._done:,} {self._unit}", ""
            if self._total:
                counts = f"{self._done:,}/{self._total:,} {self._unit} ({self._done / self._total:.0%})"
                left = self._time_left(self._total - self._done, now)
            self._print(counts, self._shown_rate(), left)

    def skip(self, count: int) -> None:
        """Adds units that an earlier run has finished, which say nothing of the rate."""
        self._initial += count
        self._done += count
        if not self._bar.disable:
            self._bar.initial += count
            self._bar.update(count)

    def complete(self) -> None:
        """Notes that there are no more units than the finished ones, where the total was an estimate."""
        self._total = self._bar.total = self._done

    def note(self, text: str | Callable[[], str]) -> None:
        """Shows `text`, such as the current loss, from the next line on. A function is called for each."""
        self._note = text
        if not self._bar.disable:
            self._bar.set_postfix_str(self._shown_note(), refresh=False)

    def write(self, line: str) -> None:
        """Prints a separate line without breaking the bar, even if no progress is shown."""
        self._bar.write(line, file=sys.stderr)
        sys.stderr.flush()

    def _time_left(self, units: int, now: float) -> str:
        done = self._done - self._initial
        if self._first_line is None:
            self._first_line = now, done
        began, before = self._first_line
        if done == before:
            return ""
        return f"{format_seconds(max(units, 0) * (now - began) / (done - before))} left"

    def _shown_note(self) -> str:
        return self._note if isinstance(self._note, str) else self._note()

    def _rate(self) -> float:
        """The units per second of this run."""
        return (self._done - self._initial) / max(time.monotonic() - self._started, 1e-9)

    def _shown_rate(self) -> str:
        rate = self._rate()
        return f"{rate:,.0f} {self._unit}/s" if rate >= 100 else f"{rate:.3g} {self._unit}/s"

    def _print(self, *parts: str) -> None:
        shown = ", ".join(filter(None, [*parts, self._shown_note()]))
        print(f"{self._description}: {shown}", file=sys.stderr, flush=True)


def tracked(
    items: Iterable[Item],
    description: str,
    unit: str,
    *,
    total: int | None = None,
    shown: bool = True,
) -> Iterator[Item]:
    """Yield the items and report progress; `total` is needed where `items` has no length."""
    if total is None:
        total = len(items)  # type: ignore[arg-type]
    with Progress(description, total, unit, shown=shown) as progress:
        for item in items:
            yield item
            progress.update()


def format_seconds(seconds: float) -> str:
    """Return a duration in its two largest units, such as "2 h 05 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 24 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
