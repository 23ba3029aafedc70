"""Exports and reports that were damaged: nothing is uploaded, and no command shows their numbers."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bad_input.commands import Case, CheckCase, each
from tests.fuzz.damage import cut, empty, flip, junk, remove

WEIGHTS, CONFIG, METRICS = "export/model.safetensors", "export/config.json", "report/metrics.json"


@pytest.fixture(autouse=True)
def run(finished: tuple[Path, str], tmp_path: Path) -> None:
    leave_out = shutil.ignore_patterns("capture-*", "train-*", "data-*", "answers-*")
    shutil.copytree(finished[0], tmp_path / "run", symlinks=True, ignore=leave_out)


def push(name: str, file: str, change: Callable[[Path], object], *says: str) -> Case:
    return Case(
        f"push_{name}",
        ("run", "--repo", "me/drafter", "--dry-run"),
        says,
        prepare=lambda root: (change(root / "run" / file), None)[1],
        script="scripts/push_to_hub",
        absent=("total",),
    )


CHANGED = "run the recipe again, which exports again"
CASES = [
    push("no_run", ".", shutil.rmtree, "OUTPUT_DIR=run: No such directory"),
    push("no_export", "export", remove, "OUTPUT_DIR=run: Has no config.json: run the stage 'export'"),
    push("no_report", METRICS, remove, "OUTPUT_DIR=run: Has no metrics.json: run the stage 'report'"),
    push("weights_missing", WEIGHTS, remove, "model.safetensors is missing", CHANGED),
    push("weights_flipped", WEIGHTS, flip, "model.safetensors was altered", CHANGED),
    push("weights_cut", WEIGHTS, cut, "model.safetensors was altered", CHANGED),
    push("weights_empty", WEIGHTS, empty, "model.safetensors was altered", CHANGED),
    push("config_flipped", CONFIG, flip, "config.json was altered", CHANGED),
    push("report_flipped", METRICS, flip, "report=run/report/metrics.json", "stages=[report]"),
    push("report_cut", METRICS, cut, "report=run/report/metrics.json", "stages=[report]"),
    push("report_junk", METRICS, junk, "report=run/report/metrics.json", "stages=[report]"),
    *(
        Case(
            f"serve_k_{name}",
            ("serve-k", "run"),
            ("report=run/report/metrics.json", "stages=[report]"),
            prepare=lambda root, change=change: (change(root / "run" / METRICS), None)[1],  # type: ignore[misc]
            script="scripts/report",
        )
        for name, change in (("flipped", flip), ("cut", cut), ("empty", empty))
    ),
]


@each(CASES)
def test_nothing_damaged_is_shown_or_uploaded(case: Case, check_case: CheckCase) -> None:
    check_case(case)
