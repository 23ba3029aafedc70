"""Commands that a user gets wrong, and what they must answer."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runs.here import run_command
from train.command import MISTAKE

PORT = "{port}"  # in arguments and messages: the port that the fault yields


def nothing(directory: Path) -> None:
    """Prepare an empty directory."""


def no_fault(directory: Path) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Case:
    """A command that a user gets wrong, and what it must answer.

    Args:
        name: names the case in the test's id.
        arguments: of the command, which runs in the test's directory: write relative paths.
        says: parts of stderr, in their order: field, value and remedy.
        prepare: makes the files that the command reads, in the test's directory.
        script: the command, relative to the repository's root.
        absent: what stdout and stderr must not contain, such as what an expensive step prints first.
        fault: what the machine has meanwhile.
    """

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    prepare: Callable[[Path], None] = nothing
    script: str = "train/main.py"
    absent: tuple[str, ...] = ()
    fault: Callable[[Path], AbstractContextManager[object]] = no_fault

    def check(self, directory: Path, *first: str) -> None:
        """Run the command, with `first` before its arguments, and check its status and its message."""
        self.prepare(directory)
        with self.fault(directory) as port:
            arguments = [one.replace(PORT, str(port)) for one in (*first, *self.arguments)]
            outcome = run_command(self.script, *arguments, directory=directory)
        printed = f"status {outcome.status}\n{outcome.out}\n--- stderr\n{outcome.err}"
        assert "Traceback" not in outcome.err, printed
        assert outcome.status == MISTAKE, printed
        rest = outcome.err
        for part in (one.replace(PORT, str(port)) for one in self.says):
            assert part in rest, f"not said, or in another order: {part}\n{printed}"
            rest = rest.partition(part)[2]
        for part in self.absent:
            assert part not in outcome.out + outcome.err, printed
        lines = [line for line in outcome.err.splitlines() if line.strip() and not line.startswith("  ")]
        assert "error: " in lines[-1], f"the message, with its indented examples, is not the end\n{printed}"


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Return the mark that runs a test with each of the cases under its name."""
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])
