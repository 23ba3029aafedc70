import errno
import fcntl
import gc
import multiprocessing
import os
import weakref
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from data.locks import holder, try_lock
from eagle31.errors import UserError

FORK = multiprocessing.get_context("fork")


def hold(path: Path, taken: Event, child: Callable[[], object]) -> None:
    lock = try_lock(path)
    assert lock is not None
    FORK.Process(target=child).start()
    taken.set()
    multiprocessing.Event().wait()


def test_a_lock_is_free_once_its_holder_is_killed_and_not_before(tmp_path: Path) -> None:
    path, taken, child_runs = tmp_path / "lock", FORK.Event(), FORK.Event()
    reading, writing = os.pipe()

    def child() -> None:
        os.close(writing)
        child_runs.set()
        os.read(reading, 1)  # until the test ends

    process = FORK.Process(target=hold, args=(path, taken, child))
    process.start()
    taken.wait()
    child_runs.wait()
    assert try_lock(path) is None
    assert holder(path).startswith(f"process {process.pid} on ")
    process.kill()
    process.join()
    lock = try_lock(path)
    assert lock is not None
    with lock:
        assert try_lock(path) is None
    os.close(reading)
    os.close(writing)


def test_nothing_keeps_a_lock_that_was_released(tmp_path: Path) -> None:
    lock = try_lock(tmp_path / "lock")
    assert lock is not None
    lock.close()
    kept = weakref.ref(lock)
    del lock
    gc.collect()
    assert kept() is None


def test_a_file_system_without_flock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="flock") as refused:
        try_lock(tmp_path / "lock")
    assert refused.value.value == tmp_path / "lock"
