"""The library `kill_points.c`, and the variables that tell it where to stop a process."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from tests.chaos.points import KillPoint

SOURCE = Path(__file__).with_name("kill_points.c")
_NAMES = ("EAGLE31_CHAOS", "CHAOS_ROOT", "CHAOS_LOG", "CHAOS_OPERATION", "CHAOS_PATTERN", "CHAOS_RANK")
_NUMBER = "CHAOS_NUMBER"


def compiler() -> str | None:
    """Return the path of a C compiler, if there is one."""
    configured = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return shutil.which(configured) or shutil.which("cc")


def preloads(directory: Path) -> dict[str, str]:
    """Return the variables that preload the library, which is compiled into a directory once.

    Without a compiler there are none.
    """
    command = compiler()
    if command is None:
        return {}
    library = directory / "kill_points.so"
    if not library.exists():
        building = directory / f"kill_points.{os.getpid()}.so"
        options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run([command, *options, "-o", building, SOURCE, "-ldl"], check=True)
        building.rename(library)
    return {"LD_PRELOAD": str(library)}


def log_variables(notes: Path, root: Path) -> dict[str, str]:
    """Return the variables of a run whose changes are logged in `notes/points`."""
    return dict(zip(_NAMES, (str(notes), str(root), "1", "", "", ""), strict=True)) | {_NUMBER: ""}


def stop_variables(point: KillPoint, notes: Path, root: Path) -> dict[str, str]:
    """Return the variables of a run one process of which stops at a point."""
    rank = "" if point.rank is None else str(point.rank)
    settings = (str(notes), str(root), "", point.operation, point.pattern, rank)
    return dict(zip(_NAMES, settings, strict=True)) | {_NUMBER: str(point.number)}
