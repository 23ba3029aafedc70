"""A run of two ranks that is killed in capture and in training ends as one that nobody killed.

It has fewer held-out prompts than ranks.
"""

import shutil
import signal
from pathlib import Path

from data.embedded.target import EmbeddedTarget
from tests.processes import wait_for
from tests.runs.forked import RUN_SECONDS, Ranks, start
from tests.runs.outcome import leftovers, outcome_of
from tests.train.conftest import small_target  # noqa: F401
from tests.train.small_run import RECIPE, arguments, saved_steps
from train.command import MISTAKE

SCRIPT = "tests/runs/small_shards.py"
SMALLER = (
    "data.max_samples=48",
    "train.max_steps=8",
    "train.save_every=2",
    "train.keep_checkpoints=2",
    "train.validate_every=4",
    "train.rows_per_step=2",
    "data.num_validation=1",
    "data.num_test=1",
    "evaluate.max_new_tokens=12",
    "export.dtype=float32",
)


def test_a_killed_run_ends_as_one_that_nobody_killed(
    small_target: EmbeddedTarget,  # noqa: F811
    tmp_path: Path,
) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"

    def begin(directory: Path, **variables: str) -> Ranks:
        command = [f"recipe={RECIPE}", *arguments(small_target, directory), *SMALLER]
        log = directory.with_suffix(".log")
        return start(SCRIPT, *command, log=log, num_processes=2, variables=variables)

    ranks = begin(undisturbed)
    assert ranks.wait() == 0, ranks.printed()
    ranks = begin(killed)
    wait_for(lambda: list(killed.glob("artifacts/capture-*/train/shard-*")), 0.01, ranks.printed)
    ranks.kill()
    ranks = begin(killed, KILLED_RANK="1", KILLED_AT="5")
    for one in ranks.processes:
        one.join(RUN_SECONDS)
    assert [one.exitcode for one in ranks.processes] == [MISTAKE, -signal.SIGKILL]
    assert "Traceback" not in ranks.printed()
    assert ranks.printed().splitlines()[-1].startswith("error: rank 0 on ")
    assert saved_steps(killed)[0] == "step-00000002"
    ranks = begin(killed)
    assert ranks.wait() == 0, ranks.printed()
    found, expected = outcome_of(killed), outcome_of(undisturbed)
    assert {name for name in expected | found if found.get(name) != expected.get(name)} == set()
    assert not leftovers(killed)
    shutil.rmtree(tmp_path)
