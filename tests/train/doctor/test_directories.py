"""Directories with and without permission, room and locks."""

import errno
import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from tests.bad_input.faults import protected, read_only, small_disk
from train.doctor.check import Check, Status
from train.doctor.directories import (
    SpaceUse,
    clock_check,
    clocks_check,
    lock_check,
    own_directory_check,
    own_umask,
    space_checks,
    umask_check,
    writable_check,
)

FORK = multiprocessing.get_context("fork")


def output(directory: Path) -> Check:
    return writable_check("output_dir", "output_dir", directory)


def test_a_directory_that_does_not_exist_yet_is_as_writable_as_its_parent(tmp_path: Path) -> None:
    assert output(tmp_path / "a" / "b").status is Status.ok
    assert os.listdir(tmp_path) == []


def test_a_directory_in_which_others_can_exchange_files_is_refused(tmp_path: Path) -> None:
    def found(path: Path) -> str | None:
        check = own_directory_check("spool", "capture.spool_dir", path)
        return None if check.status is Status.ok else check.found

    directory, link = tmp_path / "spool", tmp_path / "link"
    assert found(directory) is None  # there is none yet
    directory.mkdir(mode=0o700)
    link.symlink_to(directory)
    assert (found(directory), found(link)) == (None, "it is a link")
    directory.chmod(0o777)
    assert found(directory) == "every account can write to it"
    directory.chmod(0o1777)  # as /dev/shm is
    assert found(directory) is found(Path("/dev/shm")) is None
    if os.getuid() == 0:
        os.chown(directory, 12345, -1)
        assert found(directory) == "it belongs to account 12345"


def test_no_permission_is_found_at_the_nearest_directory(tmp_path: Path) -> None:
    with protected(tmp_path):
        check = output(tmp_path / "a" / "b")
    assert (check.status, check.found) == (Status.lacking, f"{tmp_path}: Permission denied")
    assert (check.field, check.value) == ("output_dir", tmp_path / "a" / "b")


def test_a_read_only_file_system_is_found(tmp_path: Path) -> None:
    with read_only(tmp_path):
        assert output(tmp_path).found == f"{tmp_path}: Read-only file system"


def test_what_another_account_has_made_in_the_directory_counts(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    with protected(tmp_path / "artifacts"):
        assert output(tmp_path).found == f"{tmp_path / 'artifacts'}: Permission denied"


@pytest.mark.parametrize("below", [".", "a/b"])
def test_a_file_is_no_directory(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    assert output(tmp_path / "file" / below).found == f"{tmp_path / 'file'} is a file"


def test_a_full_disk_is_not_writable(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 1 << 16):
        (disk / "fill").write_bytes(bytes(1 << 16))
        assert output(disk).found == f"{disk}: No space left on device"


def test_what_goes_to_one_disk_is_added_up(tmp_path: Path) -> None:
    disk, kib = tmp_path / "disk", 1 << 10
    with small_disk(disk, 1024 * kib):
        uses = [
            SpaceUse(disk / "run", "store", 700 * kib, "Less of it."),
            SpaceUse(disk / "cache", "target", 600 * kib, "Another disk."),
            SpaceUse(tmp_path, "export", 1, ""),
        ]
        small, large = space_checks(uses)
        assert (small.status, small.remedy) == (Status.lacking, "Less of it.")
        assert small.needed == "1.33 MB: store 0.717 MB, target 0.614 MB"
        assert large.status is Status.ok
        assert space_checks(uses[:1])[0].status is Status.ok


def test_locks_are_tried(tmp_path: Path) -> None:
    assert lock_check(tmp_path).found == "flock"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (OSError(errno.ENOSYS, "not there"), "no flock"),
        (None, "locks exclude nobody"),
        (OSError(errno.EIO, "broken"), "Input/output error"),
    ],
)
def test_file_systems_whose_flock_does_not_work(
    tmp_path: Path, answer: OSError | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        if answer is not None:
            raise answer

    monkeypatch.setattr(fcntl, "flock", flock)
    check = lock_check(tmp_path)
    assert check.status is Status.lacking
    assert check.found.endswith(found)


def test_clocks_are_compared_with_the_file_systems(tmp_path: Path) -> None:
    assert clock_check(tmp_path).status is Status.ok
    assert clocks_check(61.0).status is Status.warning


@pytest.mark.parametrize(
    ("umask", "status"), [(0o022, Status.ok), (0o027, Status.ok), (0o077, Status.warning)]
)
def test_the_group_must_be_able_to_read(umask: int, status: Status) -> None:
    before = os.umask(umask)
    try:
        assert own_umask() == umask
        assert umask_check(own_umask()).status is status
    finally:
        os.umask(before)
