"""The table of kill points in docs/reliability.md."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.chains import Chain
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
    """Write the table with its summary."""
    runs = {row.chain.name for row in rows}
    good = sum(row.result == "identical" for row in rows)
    lines = [
        f"{len(rows)} points in {len(runs)} runs; after {good} of them the results were identical.",
        "",
        "| run | stage | killed when | killed | ranks | seconds until then | seconds until free | result |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(row.cells())} |" for row in rows),
        "",
    ]
    page = PAGE.read_text()
    written, count = _SECTION.subn(lambda found: found[1] + "\n".join(lines) + found[2], page)
    assert count == 1, f"{PAGE} has no place for the table"
    PAGE.write_text(written)
