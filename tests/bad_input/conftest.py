"""Fixtures of the tables of bad input."""

from pathlib import Path

import pytest

from tests.bad_input.commands import Case, CheckCase, Outcome, check
from tests.train.conftest import captured, finished, small_target

__all__ = ["captured", "finished", "small_target"]  # fixtures that runs of tests/train share


@pytest.fixture
def check_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckCase:
    """Runs a case in the test's directory and checks what it must answer."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "disabled")

    def run(case: Case) -> Outcome:
        return check(case, tmp_path)

    return run
