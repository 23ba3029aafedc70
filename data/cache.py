"""The directory for files that outlive a run and can be made again."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from data.locks import lock


def cache_directory() -> Path:
    """Return the directory in EAGLE31_CACHE; by default `eagle31` in the user's cache directory."""
    own = os.environ.get("EAGLE31_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle31"


def build_once(finished: Path, build: Callable[[Path], None]) -> None:
    """Make a directory if it is missing. If there are several callers, one makes it and the others wait.

    Args:
        build: fills an empty directory, which is then renamed.
    """
    if finished.is_dir():
        return
    finished.parent.mkdir(parents=True, exist_ok=True)
    with lock(finished.with_name(f"{finished.name}.lock")):
        if not finished.is_dir():
            partial = finished.with_name(f"{finished.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # what a process that died has left
            partial.mkdir()
            build(partial)
            os.replace(partial, finished)
