"""A run of three ranks that is killed at random moments and started again ends as one that nobody killed.

It has fewer held-out prompts than ranks.
"""

import random
import shutil
import time
from pathlib import Path

from data.embedded.target import EmbeddedTarget
from tests.runs.forked import Ranks, start
from tests.runs.outcome import leftovers, outcome_of
from tests.train.conftest import small_target  # noqa: F401
from tests.train.small_run import RECIPE, arguments

SCRIPT = "tests/runs/small_shards.py"
NUM_KILLS = 2
SMALLER = (
    "data.max_samples=48",
    "train.max_steps=8",
    "train.save_every=2",
    "train.keep_checkpoints=2",
    "train.validate_every=4",
    "train.rows_per_step=3",
    "data.num_validation=2",
    "data.num_test=2",
    "evaluate.max_new_tokens=12",
    "export.dtype=float32",
)


def test_a_killed_run_ends_as_one_that_nobody_killed(
    small_target: EmbeddedTarget,  # noqa: F811
    tmp_path: Path,
) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"

    def begin(directory: Path) -> Ranks:
        command = [f"recipe={RECIPE}", *arguments(small_target, directory), *SMALLER]
        return start(SCRIPT, *command, log=directory.with_suffix(".log"), num_processes=3)

    started = time.monotonic()
    ranks = begin(undisturbed)
    assert ranks.wait() == 0, ranks.printed()
    seconds = time.monotonic() - started
    # Each start is killed before a whole run could have ended; which moments these are, chance decides.
    moments = random.Random(2)
    for _ in range(NUM_KILLS):
        ranks = begin(killed)
        time.sleep(moments.uniform(0, seconds))
        victims = ranks.processes if moments.random() < 0.5 else [moments.choice(ranks.processes)]
        for victim in victims:
            victim.kill()
        ranks.wait()
    ranks = begin(killed)
    assert ranks.wait() == 0, ranks.printed()
    found, expected = outcome_of(killed), outcome_of(undisturbed)
    assert {name for name in expected | found if found.get(name) != expected.get(name)} == set()
    assert not leftovers(killed)
    shutil.rmtree(tmp_path)
