"""Where the runs differ: acceptance lengths by draft length, temperature and cell, with paired intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from train.reporting.comparison.runs import Run
from train.reporting.results import GREEDY, acceptances
from train.resampling.bootstrap import Interval
from train.resampling.paired import paired_ratio

MAX_NAMED = 3  # cells in a sentence


@dataclass(frozen=True)
class Place:
    """One thing that was measured in all the runs, the reference first."""

    group: str
    cell: bool  # of the matrix
    k: int
    lengths: tuple[Interval, ...]
    ratios: tuple[Interval, ...]  # to the reference's acceptance length; the first is 1

    def verdict(self, index: int) -> str:
        """Return how a run compares with the reference: "longer", "shorter", or "not told apart"."""
        if self.ratios[index].low > 1:
            return "longer"
        return "shorter" if self.ratios[index].high < 1 else "not told apart"


def places(runs: Sequence[Run]) -> list[Place]:
    """Return all that the runs have in common: greedy drafts at each temperature, and cells of the matrix.

    Cells are compared at the draft length of the reference's evaluation.

    Args:
        runs: all can be compared with the first.
    """
    found = []
    k, cells = runs[0].evaluation["k"], {cell["name"] for cell in _cells(runs[0])}
    for name in _groups(runs[0]):
        sides = [_groups(run).get(name) for run in runs]
        known = [side for side in sides if side is not None]
        hashes = {side.get("prompts_hash") for side in known}
        if len(known) == len(runs) and len(hashes) == 1 and None not in hashes:
            cell = name in cells
            found += [place for place in _in_group(name, cell, known) if not cell or place.k == k]
    return found


def left_out(runs: Sequence[Run]) -> list[str]:
    """Return the names of what the reference has and not every run, or with other prompts."""
    shown = {place.group for place in places(runs)}
    return [name for name in _groups(runs[0]) if name not in shown]


def _groups(run: Run) -> dict[str, dict[str, Any]]:
    groups = {
        f"temperature {one.temperature:g}": one.measured
        for one in acceptances(run.evaluation)
        if one.drafter == "trained" and one.drafts == GREEDY
    }
    return groups | {cell["name"]: cell for cell in _cells(run)}


def _cells(run: Run) -> list[dict[str, Any]]:
    return (run.evaluation.get("matrix") or {}).get("cells", [])


def _in_group(name: str, cell: bool, sides: Sequence[dict[str, Any]]) -> list[Place]:
    indices = [{row["k"]: index for index, row in enumerate(side["by_draft_length"])} for side in sides]
    found = []
    for k in indices[0]:
        if all(k in one for one in indices):
            rows = [side["by_draft_length"][one[k]] for side, one in zip(sides, indices, strict=True)]
            lengths = tuple(Interval(row["acceptance_length"], row["low"], row["high"]) for row in rows)
            ratios = tuple(_ratio(side, sides[0], one[k]) for side, one in zip(sides, indices, strict=True))
            found.append(Place(name, cell, k, lengths, ratios))
    return found


def _ratio(side: dict[str, Any], reference: dict[str, Any], index: int) -> Interval:
    return Interval(1.0, 1.0, 1.0) if side is reference else paired_ratio(side, reference, index)


def answers(runs: Sequence[Run], found: Sequence[Place]) -> list[str]:
    """Return in words where each run is better than the reference, and where worse."""
    lines = []
    for index, run in enumerate(runs[1:], start=1):
        said = []
        for group, members in groupby(found, key=lambda place: "" if place.cell else place.group):
            for verdict, same in _by_verdict(list(members), index):
                where = f"{group}, k = {_ranges([place.k for place in same])}"
                if not group:
                    where = f"in {_cell_names(same)}"
                said.append(f"{verdict} {where}" if not group else f"{verdict} at {where}")
        lines.append(f"{run.name}, compared with {runs[0].name}: {'; '.join(said)}.")
    return lines


def _cell_names(same: Sequence[Place]) -> str:
    if len(same) > MAX_NAMED:
        return f"{len(same)} cells of the matrix"
    return f"the cells {'; '.join(place.group for place in same)}"


def _by_verdict(members: Sequence[Place], index: int) -> list[tuple[str, list[Place]]]:
    found: dict[str, list[Place]] = {}
    for place in members:
        found.setdefault(place.verdict(index), []).append(place)
    return list(found.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers in ascending order with runs of neighbours joined: 1, 4 to 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in parts)
