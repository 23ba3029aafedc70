"""The table of kill points in docs/reliability.md."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.chains import RUNS, Chain
from tests.chaos.points import KillPoint
from tests.train.torchrun import ROOT

PAGE = ROOT / "docs" / "reliability.md"
_SECTION = re.compile(r"(?s)(<!-- kill points -->\n).*?(<!-- end of kill points -->)")


@dataclass
class Row:
    """A point, and what came of it.

    Attributes:
        free_seconds: from the kill until no process was left and the lock was free.
        seconds: from the start until then.
        result: "identical", or how the run's results differ from those of the uninterrupted run.
    """

    chain: Chain
    point: KillPoint
    free_seconds: float | None = None
    seconds: float | None = None
    result: str = "not reached"

    def cells(self) -> list[str]:
        point = self.point
        where = point.name if point.rank is None else f"{point.name} (rank {point.rank})"
        processes = str(point.num_processes)
        times = ["" if value is None else f"{value:.1f}" for value in (self.seconds, self.free_seconds)]
        return [self.chain.name, point.stage, where, point.victim.value, processes, *times, self.result]


def write_table(rows: Sequence[Row]) -> None:
    """Write the table with its summary. Rows of runs that were not made this time stay."""
    page = PAGE.read_text()
    found = _SECTION.search(page)
    assert found is not None, f"{PAGE} has no place for the table"
    lines = found[0].splitlines()
    by_run: dict[str, list[str]] = {name: [] for name in RUNS}
    for line in lines:
        if line.startswith("| ") and (name := line.split(" | ")[0].removeprefix("| ")) in by_run:
            by_run[name].append(line)
    for name in {row.chain.name for row in rows}:
        by_run[name] = [f"| {' | '.join(row.cells())} |" for row in rows if row.chain.name == name]
    written = [line for own in by_run.values() for line in own]
    runs = sum(map(bool, by_run.values()))
    good = sum(line.endswith("| identical |") for line in written)
    lines = [
        f"{len(written)} points in {runs} runs; the results after {good} of them are identical.",
        "",
        "| run | stage | killed when | killed | ranks | seconds until then | seconds until free | result |",
        "|---|---|---|---|---|---|---|---|",
        *written,
        "",
    ]
    PAGE.write_text(_SECTION.sub(lambda found: found[1] + "\n".join(lines) + found[2], page))
