"""The whole check: all parts one after the other, then one page and one JSON file."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle31.errors import UserError
from eagle31.json_files import write_json
from train.bench.gpu_check.part import Part
from train.bench.gpu_check.record import Options
from train.bench.gpu_check.report import write_page
from train.bench.gpu_check.runner import FAILED, NOT_RUN, PASSED, Outcome, run_part
from train.bench.gpu_check.wheels import install_wheels


@dataclass(frozen=True)
class Results:
    """The files that the check leaves, and the outcome of each part."""

    outcomes: list[Outcome]
    page: Path
    numbers: Path

    def count(self, status: str) -> int:
        return sum(one.status == status for one in self.outcomes)

    @property
    def summary(self) -> str:
        return ", ".join(f"{self.count(status)} {status}" for status in (PASSED, FAILED, NOT_RUN))


def check(
    parts: Sequence[Part],
    options: Options,
    *,
    minutes: float,
    wheels: Path | None = None,
    report: Callable[[str], None] = print,
) -> Results:
    """Run the parts and write `index.html` and `gpu_check.json`, again after each part.

    Args:
        minutes: limit of all parts together.
        wheels: a directory of wheels for packages that the environment lacks.
        report: gets a line about each part.
    """
    options.directory.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    environment, installed = part_environment(options, wheels)
    outcomes: list[Outcome] = []
    for part in parts:
        report(f"{part.name}: {part.title} ...")
        left = minutes * 60 - (time.monotonic() - started)
        outcome = run_part(part, options, environment, left)
        outcomes.append(outcome)
        report(f"{part.name}: {describe(outcome)}")
        results = write(options, outcomes, installed, time.monotonic() - started)
    return results


def part_environment(options: Options, wheels: Path | None) -> tuple[Mapping[str, str], list[str]]:
    """Return the environment of the parts' processes, and the wheels that were installed for them."""
    site = options.directory / "packages"
    installed = [] if wheels is None else install_wheels(wheels, site)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if installed:
        paths = [str(site.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment, installed


def write(options: Options, outcomes: list[Outcome], installed: list[str], seconds: float) -> Results:
    found: dict[str, Any] = {
        "dry_run": options.dry_run,
        "num_gpus": options.num_gpus,
        "seconds": round(seconds, 1),
        "wheels": installed,
        "command": sys.argv,
        "parts": [one.to_json() for one in outcomes],
    }
    page, numbers = options.directory / "index.html", options.directory / "gpu_check.json"
    results = Results(list(outcomes), page, numbers)
    write_json(numbers, found)
    write_page(page, found, results.summary)
    return results


def describe(outcome: Outcome) -> str:
    """Return a line about a part that has ended."""
    line = f"{outcome.status} after {outcome.seconds:.0f} s"
    if outcome.status == NOT_RUN:
        return f"{outcome.status}: {outcome.findings.not_run}"
    reasons = [outcome.findings.error] if outcome.findings.error else []
    reasons += [f"{one['what']}: {one['detail']}" for one in outcome.findings.checks if not one["passed"]]
    return f"{line}: {'; '.join(reasons)}" if reasons else line


def chosen(parts: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    """Return the named parts in the order of the check; all of them without names.

    Raises:
        UserError: a name is unknown.
    """
    known = [part.name for part in parts]
    for name in names or ():
        if name not in known:
            raise UserError("--parts", name, f"Give some of {', '.join(known)}.")
    return [part for part in parts if names is None or part.name in names]
