"""The exports that the parity tests compare, made once in a session."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.runs.forked import run
from tests.shared import make_once
from tests.train.parity.parity_cases import CASES, CORE

FULL_SECONDS = 7200


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the long matrix runs."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def case_names(full: bool) -> Sequence[str]:
    return tuple(CASES) if full else CORE


@pytest.fixture(scope="session")
def trained(case_names: Sequence[str], full: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all cases' targets and exports, from real runs of the pipeline.

    The runs are shorter without `--full`.
    """

    def make(directory: Path) -> None:
        target_steps, rows_per_step, ttt_steps = ("150", "4", "4") if full else ("60", "2", "3")
        run(
            "tests/train/parity/parity_cases.py",
            *(directory, target_steps, rows_per_step, ttt_steps, *case_names),
            seconds=FULL_SECONDS,
            torchrun=False,
        )

    return make_once(tmp_path_factory, "parity", make)
