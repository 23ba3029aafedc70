"""A training continues on other ranks, at another ZeRO stage."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs.forked import RUN_SECONDS
from tests.train.torchrun import torchrun

WORKER = "tests/train/trainer/elastic_worker.py"
PLAIN = {"bf16": False, "muon": False, "offload": False}
TRAININGS: dict[str, dict[str, Any]] = {
    "adamw": {"zero_stage": 2},
    "muon": {"zero_stage": 3, "muon": True},
    "bf16": {"zero_stage": 1, "bf16": True, "muon": True},
}
# Each ZeRO stage is resumed on another one, on fewer and on more ranks than the two that saved.
RESUMED = {
    1: {"adamw": [{"zero_stage": 0}], "muon": [{"zero_stage": 2}], "bf16": [{"zero_stage": 3}]},
    4: {
        "adamw": [{"zero_stage": 3, "offload": True}],
        "muon": [{"zero_stage": 1}],
        "bf16": [{"zero_stage": 2}],
    },
}
KINDS = {
    "adamw": ["weights", "exp_avg", "exp_avg_sq"],
    "muon": ["weights", "exp_avg", "exp_avg_sq", "momentum_buffer"],
    "bf16": ["weights", "exp_avg", "exp_avg_sq", "momentum_buffer"],
}


def work(
    directory: Path, tasks: dict[str, Any], num_processes: int, seconds: float = RUN_SECONDS
) -> dict[str, Any]:
    file = directory / f"tasks-{num_processes}.json"
    file.write_text(json.dumps(tasks))
    torchrun(WORKER, str(file), num_processes=num_processes, seconds=seconds)
    return json.loads(file.with_suffix(".results.json").read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Trainings that two ranks saved."""
    root = tmp_path_factory.mktemp("elastic")
    tasks = {
        name: {"action": "save", "directory": str(root / name)} | PLAIN | settings
        for name, settings in TRAININGS.items()
    }
    return root, work(root, tasks, 2)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_other_ranks_at_another_stage_continue_exactly(
    saved: tuple[Path, dict[str, Any]], num_ranks: int
) -> None:
    root, results = saved
    tasks = {
        f"{name} {json.dumps(change)}": {"action": "resume", "directory": str(root / name)}
        | PLAIN
        | TRAININGS[name]
        | change
        for name, changes in RESUMED[num_ranks].items()
        for change in changes
    }
    check(results, work(root, tasks, num_ranks))


def check(results: dict[str, Any], resumed: dict[str, Any]) -> None:
    for task, found in resumed.items():
        name = task.partition(" ")[0]
        assert found["step"] == 2, task
        # Bit for bit, written by these ranks at this stage: weights and moments.
        assert found["different"] == [], task
        assert found["kinds"] == KINDS[name], task
        for ours, theirs in zip(found["losses"], results[name]["losses"], strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5), task
            assert ours[1] == pytest.approx(theirs[1], rel=1e-4), task
