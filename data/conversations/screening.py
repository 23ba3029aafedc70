"""The conversations that are left out before any is held out, with the reasons."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.conversations.near_duplicates import near_duplicates
from data.conversations.read_sources import ReadSources


@dataclass(frozen=True)
class Screening:
    """Which of C conversations are left out, and why."""

    overlaps: NDArray[np.int32]  # [C], the evaluation set that has the conversation's prompt, or -1
    duplicate_of: NDArray[np.int64]  # [C], the earlier conversation that it nearly repeats, or -1

    @property
    def kept(self) -> NDArray[np.int64]:
        """The indices of the other conversations."""
        return np.flatnonzero((self.overlaps < 0) & (self.duplicate_of < 0))

    @property
    def num_near_duplicates(self) -> int:
        """The number of near-duplicates among those without an evaluation set's prompt."""
        return int(((self.overlaps < 0) & (self.duplicate_of >= 0)).sum())

    def num_overlapping(self, set_names: list[str]) -> dict[str, int]:
        """Return how many conversations have a prompt of each evaluation set."""
        counts = Counter(self.overlaps[self.overlaps >= 0].tolist())
        return {name: counts[index] for index, name in enumerate(set_names)}


def screened(
    read: ReadSources, similarity: float | None, *, with_answers: bool, num_workers: int
) -> Screening:
    """Return which conversations are near-duplicates or have a prompt of an evaluation set.

    Args:
        similarity: the least similarity of near-duplicates; None: there are none.
        with_answers: whether the assistant's messages are compared too.
    """
    if similarity is None:
        return Screening(read.overlaps, np.full(len(read), -1, dtype=np.int64))
    found = near_duplicates(
        read.table, similarity, with_answers=with_answers, num_workers=num_workers, progress=True
    )
    return Screening(read.overlaps, found)


def write_left_out(path: Path, read: ReadSources, screening: Screening, set_names: list[str]) -> None:
    """Write a line of JSON for each conversation that is left out: its id, its source and the reason."""
    sources = read.sources
    with path.open("w", encoding="utf-8") as stream:
        for index in np.flatnonzero((screening.overlaps >= 0) | (screening.duplicate_of >= 0)).tolist():
            line = {"id": read.table[index].id, "source": read.names[sources[index]]}
            if screening.overlaps[index] >= 0:
                line["evaluation_set"] = set_names[screening.overlaps[index]]
            else:
                line["near_duplicate_of"] = read.table[int(screening.duplicate_of[index])].id
            stream.write(json.dumps(line) + "\n")
