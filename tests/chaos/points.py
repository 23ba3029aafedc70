"""Where runs are killed: the chosen points, and points drawn from all that an uninterrupted run does."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Victim(Enum):
    """What is killed."""

    run = "every process"
    rank = "one rank"
    launcher = "the launcher"
    engine = "vLLM's engine"


@dataclass(frozen=True)
class KillPoint:
    """A change of a file, or a request to the Hub, during which a run is killed.

    Args:
        name: what happens there.
        operation: as `kill_points.c` names it, or "request" or "answer", of the Hub; empty for any.
        pattern: of paths below the output directory, or of the Hub's.
        number: which of these.
        rank: the rank that does it, where there are two; None for any.
    """

    name: str
    stage: str
    operation: str
    pattern: str
    number: int = 1
    rank: int | None = None
    victim: Victim = Victim.run
    num_processes: int = 1

    @property
    def is_request(self) -> bool:
        return self.operation in ("request", "answer")


@dataclass(frozen=True)
class Change:
    """A line of the log of an uninterrupted run."""

    rank: str  # "-" without a launcher
    operation: str
    path: str

    @property
    def stage(self) -> str:
        """The stage to which the path belongs."""
        found = re.match(r"artifacts/(\w+)-", self.path)
        if found:
            return found[1]
        return {"export": "export", ".export.partial": "export", "report": "report"}.get(
            self.path.partition("/")[0], "start"
        )


def read_changes(log: Path) -> list[Change]:
    """Return what the processes of a run changed, in its order."""
    lines = [line.split(" ", 3) for line in log.read_text().splitlines()]
    return [Change(rank, operation, path) for _, rank, operation, path in lines]


def pattern_of(path: str) -> str:
    """Return a pattern of the path in any run: without fingerprints and process ids."""
    path = re.sub(r"-[0-9a-f]{12}(?=/|$)", "-*", path)
    return re.sub(r"\.\d+\.partial$", ".*.partial", re.sub(r"\.tmp\w{6}$", ".tmp*", path))


def drawn_points(
    changes: Sequence[Change], num_points: int, num_processes: int, victims: Sequence[Victim], seed: int
) -> list[KillPoint]:
    """Draw points from the changes of an uninterrupted run: every stage in turn, each change equally likely.

    Args:
        victims: what is killed, in turn.
    """
    draw = random.Random(seed)
    by_stage: dict[str, list[Change]] = {}
    for change in changes:
        by_stage.setdefault(change.stage, []).append(change)
    stages = sorted(by_stage)
    draw.shuffle(stages)
    points = []
    for index in range(num_points):
        stage = stages[index % len(stages)]
        change = draw.choice(by_stage[stage])
        rank = int(change.rank) if num_processes > 1 else None
        pattern = pattern_of(change.path)
        alike = sum(
            one.operation == change.operation
            and pattern_of(one.path) == pattern
            and rank in (None, int(one.rank))
            for one in by_stage[stage]
        )
        number = draw.randint(1, alike)
        if stage == "start":
            number = 1  # the second plan is written after another stage
        points.append(
            KillPoint(
                f"{change.operation} {shown(change.path)}",
                stage,
                change.operation,
                pattern,
                number,
                rank,
                victims[index % len(victims)],
                num_processes,
            )
        )
    return points


def shown(path: str) -> str:
    """Return a path without what differs between runs."""
    path = re.sub(r"artifacts/(\w+)-[0-9a-f]{12}/?", "", path)
    return re.sub(r"\.\d+\.partial$", ".partial", re.sub(r"\.tmp\w{6}$", ".tmp", path)) or "."
