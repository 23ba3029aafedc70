"""A training continues on other ranks, at another ZeRO stage."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.torchrun import torchrun

WORKER = "tests/train/trainer/elastic_worker.py"
PLAIN = {"bf16": False, "muon": False}
TRAININGS: dict[str, dict[str, Any]] = {
    "adamw": {"zero_stage": 2, "bf16": True},
    "muon": {"zero_stage": 3, "muon": True},
    "bf16": {"zero_stage": 1, "bf16": True, "muon": True},
}
RESUMED_AT = {"adamw": 0, "muon": 2, "bf16": 3}
ADAMW = ["weights", "exp_avg", "exp_avg_sq"]
KINDS = {"adamw": ADAMW, "muon": [*ADAMW, "momentum_buffer"], "bf16": [*ADAMW, "momentum_buffer"]}


def work(directory: Path, tasks: dict[str, Any], num_processes: int) -> dict[str, Any]:
    file = directory / f"tasks-{num_processes}.json"
    file.write_text(json.dumps(tasks))
    torchrun(WORKER, str(file), num_processes=num_processes)
    return json.loads(file.with_suffix(".results.json").read_text())


def test_one_rank_at_another_stage_continues_exactly_what_three_have_saved(tmp_path: Path) -> None:
    """tests/train/test_pipeline.py continues on more ranks.

    A mean over three ranks that is taken in bf16 would be rounded.
    """
    tasks = {
        name: PLAIN | settings | {"directory": str(tmp_path / name)} for name, settings in TRAININGS.items()
    }
    saved = work(tmp_path, {name: task | {"action": "save"} for name, task in tasks.items()}, 3)
    for name, found in saved.items():
        assert found["unfinished"] == [1], name  # two ranks had written their parts
        # The weights changed before the third rank wrote its own.
        assert found["different"] == [], name
        assert found["kinds"] == KINDS[name], name
    resumed = {
        name: task | {"action": "resume", "zero_stage": RESUMED_AT[name]} for name, task in tasks.items()
    }
    for name, found in work(tmp_path, resumed, 1).items():
        assert found["step"] == 2, name
        # Bit for bit, written by this rank at this stage: weights and moments.
        assert found["different"] == [], name
        assert found["kinds"] == KINDS[name], name
        for ours, theirs in zip(found["losses"], saved[name]["losses"], strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5), name
            assert ours[1] == pytest.approx(theirs[1], rel=1e-4), name
