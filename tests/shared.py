"""Directories that all workers of a test session share, each made by the first worker that needs it."""

import fcntl
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return the session's directory `name`, which the first caller of all workers fills with `make`.

    The others wait. Tests must not write to it.
    """
    base = factory.getbasetemp()
    # The base of an xdist worker is a folder of the session's.
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)
    directory, done, failed = shared / name, shared / f"{name}.done", shared / f"{name}.failed"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if failed.exists():
            pytest.fail(f"Another test could not make {name}:\n{failed.read_text()}", pytrace=False)
        if not done.exists():
            shutil.rmtree(directory, ignore_errors=True)  # what a worker that died has left
            directory.mkdir()
            try:
                make(directory)
            except BaseException:
                failed.write_text(traceback.format_exc())
                raise
            done.touch()
    return directory
