"""Directories that the workers of a session share, or all sessions, each made by the first that needs it."""

import fcntl
import hashlib
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import pytest
import tokenizers
import torch
import transformers

from data.cache import cache_directory

ROOT = Path(__file__).resolve().parents[1]
TRAINING_CODE = (
    ROOT / "data" / "embedded",
    ROOT / "eagle31" / "kernels" / "newton_schulz.py",
)  # of small targets


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


def make_cached(name: str, depends_on: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """Return a directory of the user's cache that `make` has filled, in this session or an earlier one.

    Args:
        name: identifies what is made, settings included.
        depends_on: the files, and the directories of Python files, whose code makes it. They are part of the
            key, as are the versions of Python and the libraries.
    """
    key = hashlib.sha256(f"{name} {sys.version} {torch.get_num_threads()}".encode())
    for library in (numpy, tokenizers, torch, transformers):
        key.update(f"{library.__name__} {library.__version__}".encode())
    for path in depends_on:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            key.update(f"{file.relative_to(ROOT)} {file.stat().st_size}".encode() + file.read_bytes())
    directory = cache_directory() / "tests" / f"{name}-{key.hexdigest()[:16]}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            partial = directory.with_name(f"{directory.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # what a process that died has left
            partial.mkdir()
            make(partial)
            partial.rename(directory)
    return directory
