"""The runs that are killed: each at several points, one after another, and started again after each."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.points import Change, KillPoint, Victim, drawn_points

SEED = 31
CHAINS_OF_ONE, CHAINS_OF_TWO = 3, 2  # drawn ones
NUM_RANDOM = 8  # points in each of them
_STAGES = ("start", "data", "vocab", "answers", "capture", "train", "export", "evaluate", "report", "push")
UNTIL_TRAINED = ("stages=[data,vocab,answers,capture,train]",)


@dataclass(frozen=True)
class Chain:
    """A run, and the points at which it is killed, in the order in which it reaches them."""

    name: str
    points: tuple[KillPoint, ...]
    num_processes: int = 1
    settings: tuple[str, ...] = ()


_SHARD = "artifacts/capture-*/train/"
_CHECKPOINTS = "artifacts/train-*/checkpoints/"
CHOSEN = (
    Chain(
        "in the middle of a write",
        (
            KillPoint("half of a write to the tokenized samples", "data", "write", "artifacts/data-*.arrow"),
            KillPoint("half of a completion's line", "answers", "write", "artifacts/answers-*/test.jsonl", 2),
            KillPoint("half of a write to a shard", "capture", "write", f"{_SHARD}.shard-*", 40),
            KillPoint(
                "half of a write to a checkpoint",
                "train",
                "write",
                f"{_CHECKPOINTS}.step-00000004*/part-*",
                2,
            ),
            KillPoint("half of the weights", "export", "write", "artifacts/export-*/.checkpoint.partial/*"),
            KillPoint("half of a pass's result", "evaluate", "write", "artifacts/evaluate-*/passes/*", 2),
            KillPoint("half of the page", "report", "write", "report/.index.html.*"),
            KillPoint("the upload of the weights", "push", "request", "/objects/*"),
        ),
    ),
    Chain(
        "just before a rename",
        (
            KillPoint(
                "the data are complete, their manifest is not", "data", "rename", "*/data-*/stage.json"
            ),
            KillPoint("a shard is complete, its sidecar is not", "capture", "rename", f"{_SHARD}*.json", 3),
            KillPoint("a checkpoint is complete and not published", "train", "rename", "*/step-00000006"),
            KillPoint("the export is complete and not linked", "export", "rename", "export"),
            KillPoint("the commit is made, its answer is lost", "push", "answer", "*/commit/main"),
        ),
    ),
    Chain(
        "between two files",
        (
            KillPoint(
                "the index is written, the manifest is not", "capture", "rename", f"{_SHARD}manifest.json"
            ),
            KillPoint("half of the best weights", "train", "write", f"{_CHECKPOINTS}best/*", 5),
            KillPoint(
                "half of an old checkpoint is removed",
                "train",
                "remove",
                f"{_CHECKPOINTS}.step-00000002.removed*/*",
                2,
            ),
        ),
    ),
    Chain(
        "one rank of two",
        (
            KillPoint("rank 1 writes a shard", "capture", "write", f"{_SHARD}*", 9, 1, Victim.rank, 2),
            KillPoint("rank 1 writes its part", "train", "write", f"{_CHECKPOINTS}*", 1, 1, Victim.rank, 2),
            KillPoint("rank 0 publishes", "train", "rename", "*/step-00000006", 1, 0, Victim.rank, 2),
        ),
        num_processes=2,
        settings=UNTIL_TRAINED,
    ),
    Chain(
        "the launcher alone",
        (
            KillPoint("rank 1 writes a shard", "capture", "write", f"{_SHARD}*", 9, 1, Victim.launcher, 2),
            KillPoint("rank 0 logs", "train", "write", "*/metrics.jsonl", 6, 0, Victim.launcher, 2),
        ),
        num_processes=2,
        settings=UNTIL_TRAINED,
    ),
)
DRAWN = (
    *(f"random 1.{index + 1}" for index in range(CHAINS_OF_ONE)),
    *(f"random 2.{index + 1}" for index in range(CHAINS_OF_TWO)),
)
RUNS = (*(chain.name for chain in CHOSEN), *DRAWN)
QUICK = ("in the middle of a write", "one rank of two")


def drawn_chains(changes: Sequence[Change], num_processes: int) -> list[Chain]:
    """Draw the random points among the changes of an uninterrupted run of so many processes."""
    num_chains = CHAINS_OF_ONE if num_processes == 1 else CHAINS_OF_TWO
    victims = [Victim.run] if num_processes == 1 else [Victim.rank, Victim.launcher, Victim.run]
    chains = []
    for index in range(num_chains):
        points = drawn_points(changes, NUM_RANDOM, num_processes, victims, SEED + 10 * num_processes + index)
        points.sort(key=lambda point: _STAGES.index(point.stage))
        chains.append(Chain(f"random {num_processes}.{index + 1}", tuple(points), num_processes))
    return chains
