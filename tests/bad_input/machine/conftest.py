"""The fixture of the tables of machines."""

from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from tests.bad_input.commands import CheckCase
from tests.bad_input.machine.machines import CheckMachine, Machine, check


@pytest.fixture
def check_machine(
    small_target: EmbeddedTarget, tmp_path: Path, check_case: CheckCase, monkeypatch: pytest.MonkeyPatch
) -> CheckMachine:
    """Runs a machine's case in the test's directory and checks what it must answer."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    def run(machine: Machine) -> None:
        check(machine, small_target, tmp_path, check_case)

    return run
