"""Packages from a directory of wheels, for machines without a network."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from eagle31.errors import UserError


def install_wheels(wheels: Path, site: Path) -> list[str]:
    """Install those wheels into `site` that the environment lacks in their version; return their names.

    The environment itself is not changed: `site` has to be put on PYTHONPATH. Nothing is resolved, so the
    directory has to hold the wheels of what its wheels require, too.

    Raises:
        UserError: the directory has no wheels, or pip refuses one of them.
    """
    found = sorted(Path(wheels).glob("*.whl"))
    if not found:
        raise UserError("--wheels", wheels, "The directory has no wheels.")
    missing = [wheel for wheel in found if not _installed(wheel)]
    if missing:
        _pip(missing, site)
    return [wheel.name for wheel in missing]


def _installed(wheel: Path) -> bool:
    name, wanted, *_ = wheel.name.split("-")
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False


def _pip(wheels: Sequence[Path], site: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    command = [*pip, "--target", str(site), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip gives no reason."]
        raise UserError("--wheels", wheels[0].parent, f"pip refuses them: {reason[0]}")
