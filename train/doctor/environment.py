"""This Python: its version, the packages of the project, and its threads.

This module imports the standard library alone, so that it works where the environment does not.
"""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from train.doctor.check import Check, Status, judged, ok
from train.versions import ROOT, missing_packages, package_versions

OLDEST_PYTHON = (3, 10)


def environment_checks() -> list[Check]:
    """Return the checks of this process's Python."""
    cores = len(os.sched_getaffinity(0))
    return [
        python_check(sys.version_info[:2], sys.executable),
        packages_check(missing_packages(), package_versions(), ROOT),
        threads_check(os.environ, cores),
    ]


def python_check(version: tuple[int, ...], executable: str) -> Check:
    oldest = ".".join(map(str, OLDEST_PYTHON))
    remedy = f"{executable} is too old: PYTHON=python{oldest} scripts/quickstart makes an environment."
    found = platform.python_version() if version == sys.version_info[:2] else ".".join(map(str, version))
    return judged("Python", version >= OLDEST_PYTHON, found, f"{oldest} or newer", remedy)


def packages_check(missing: Sequence[str], installed: Mapping[str, str], root: Path) -> Check:
    """Return whether what a run imports is installed.

    Args:
        missing: the distributions that pyproject.toml requires of a run and that are not installed.
        root: the checkout, whose environment is `.venv`.
    """
    if not missing:
        return ok(
            "packages", ", ".join(f"{name} {installed[name]}" for name in ("torch",) if name in installed)
        )
    activate = root / ".venv" / "bin" / "activate"
    if activate.exists() and Path(sys.prefix).resolve() != activate.parents[1].resolve():
        remedy = f"Activate the environment: source {activate}"
    elif activate.exists():
        remedy = f"Install them: {activate.parent}/pip install --editable '{root}[train]'"
    else:
        remedy = "Run scripts/quickstart once, which makes .venv, then source .venv/bin/activate."
    shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    return Check("packages", Status.lacking, f"without {shown}", "pip's extra 'train'", remedy)


def threads_check(environment: Mapping[str, str], cores: int) -> Check:
    """Return whether OpenMP has no more threads than there are cores, and whether they wait passively."""
    threads = environment.get("OMP_NUM_THREADS", str(cores))
    policy = environment.get("OMP_WAIT_POLICY", "passive")  # commands set what is open
    few = threads.isdigit() and 1 <= int(threads) <= cores
    remedy = f"Set OMP_NUM_THREADS to at most {cores}, and OMP_WAIT_POLICY=passive, or unset both."
    found = f"{cores} cores, OMP_NUM_THREADS={threads}, {policy.lower()}"
    good = few and policy.lower() == "passive"
    return judged("threads", good, found, f"1 to {cores}, passive", remedy, otherwise=Status.warning)
