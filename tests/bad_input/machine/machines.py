"""A machine with a fault, and what a small run must answer on it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from tests.bad_input.commands import MAIN, Case, CheckCase
from tests.train.small_run import arguments

Fault = Callable[[Path], AbstractContextManager[object]]
CheckMachine = Callable[["Machine"], None]

PORT = "{port}"  # the port of the fault, in arguments and messages
SERVE, SUBMIT = "scripts/serve_target", "scripts/submit"
WORK = ("data: ", "capture: ")  # what stages print when they begin
# What comes before the settings of a small run.
_FIRST = {MAIN: ("recipe=any_target",), SUBMIT: ("recipe=any_target",)}


@dataclass(frozen=True)
class Machine:
    """A case, whose arguments follow those of a small run, on a machine with a fault."""

    case: Case
    fault: Fault


def each_machine(machines: Sequence[Machine]) -> pytest.MarkDecorator:
    """Return the mark that runs a test with each of the machines under the name of its case."""
    return pytest.mark.parametrize("machine", machines, ids=[one.case.name for one in machines])


def check(machine: Machine, target: EmbeddedTarget, directory: Path, check_case: CheckCase) -> None:
    """Run a machine's case while it has its fault."""
    case = machine.case
    first = _FIRST.get(case.script, ("any_target",))
    settings = arguments(target, Path("run"))
    with machine.fault(directory) as port:
        known = [one.replace(PORT, str(port)) for one in (*first, *settings, *case.arguments)]
        says = tuple(one.replace(PORT, str(port)) for one in case.says)
        check_case(replace(case, arguments=tuple(known), says=says))
