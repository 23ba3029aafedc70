"""What a table of bad input consists of: cases for `each`, which its test hands to `check_case`."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runs.here import Outcome, run_command
from train.command import MISTAKE

MAIN = "train/main.py"


def nothing(directory: Path) -> None:
    """Prepare an empty directory."""


@dataclass(frozen=True)
class Case:
    """A command that a user gets wrong, and what it must answer.

    Args:
        name: names the case in the test's id.
        arguments: of the command, which runs in the test's directory: write relative paths.
        says: parts of stderr, in their order: field, value and remedy.
        prepare: makes the files that the command reads, in the test's directory.
        script: the command, relative to the repository's root.
        status: the expected exit status.
        absent: what stdout and stderr must not contain, such as what an expensive step prints first.
    """

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    prepare: Callable[[Path], None] = nothing
    script: str = MAIN
    status: int = MISTAKE
    absent: tuple[str, ...] = ()


CheckCase = Callable[[Case], Outcome]


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Return the mark that runs a test with each of the cases under its name."""
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have one name"
    return pytest.mark.parametrize("case", cases, ids=names)


def check(case: Case, directory: Path) -> Outcome:
    """Run a case, and check its exit status, its message, and that no traceback is printed."""
    case.prepare(directory)
    outcome = run_command(case.script, *case.arguments, directory=directory)
    printed = f"status {outcome.status}\n{outcome.out}\n--- stderr\n{outcome.err}"
    assert "Traceback" not in outcome.err, printed
    assert outcome.status == case.status, printed
    rest = outcome.err
    for part in case.says:
        assert part in rest, f"not said, or in another order: {part}\n{printed}"
        rest = rest.partition(part)[2]
    for part in case.absent:
        assert part not in outcome.out + outcome.err, printed
    if case.status == MISTAKE:
        lines = [line for line in outcome.err.splitlines() if line.strip() and not line.startswith("  ")]
        assert "error: " in lines[-1], f"the message, with its indented examples, is not the end\n{printed}"
    return outcome


def link(path: Path, to: os.PathLike[str] | str) -> None:
    """Link a shared directory, such as a target, under a short relative name."""
    path.symlink_to(to, target_is_directory=True)
