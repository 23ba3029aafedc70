import errno
import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from data.locks import try_lock
from eagle31.errors import UserError

FORK = multiprocessing.get_context("fork")


def hold(path: Path, taken: multiprocessing.synchronize.Event) -> None:
    lock = try_lock(path)
    assert lock is not None
    taken.set()
    multiprocessing.Event().wait()


def test_a_lock_is_free_once_its_holder_is_killed_and_not_before(tmp_path: Path) -> None:
    path, taken = tmp_path / "lock", FORK.Event()
    holder = FORK.Process(target=hold, args=(path, taken), daemon=True)
    holder.start()
    taken.wait()
    assert try_lock(path) is None
    holder.kill()
    holder.join()
    lock = try_lock(path)
    assert lock is not None
    with lock:
        assert try_lock(path) is None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_flock_is_refused(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="flock") as refused:
        try_lock(tmp_path / "lock")
    assert refused.value.value == tmp_path / "lock"
