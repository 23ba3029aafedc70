"""Hashes of whole files, which are remembered until a file changes."""

import hashlib
import os
from pathlib import Path

import pytest

from data import file_hashes
from data.file_hashes import hash_files


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE31_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read; hashes of small files are remembered, too."""
    found: list[str] = []
    sha256 = file_hashes._sha256
    monkeypatch.setattr(file_hashes, "_REMEMBERED_BYTES", 0)
    monkeypatch.setattr(file_hashes, "_sha256", lambda path: found.append(path.name) or sha256(path))
    return found


def test_a_file_is_read_again_only_when_it_changes(tmp_path: Path, read: list[str], cache: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text(file.name)
    expected = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert hash_files(files) == expected
    assert hash_files(files) == expected
    assert sorted(read) == ["a", "b"]
    status = files[0].stat()
    files[0].write_text("c")  # of the same size, in place, with the earlier time of modification
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    found = hash_files(files)
    assert found == [hashlib.sha256(b"c").hexdigest(), expected[1]]
    assert sorted(read) == ["a", "a", "b"]


def test_small_files_leave_nothing_in_the_cache(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a").write_text("a")
    hash_files([tmp_path / "a"])
    assert not cache.exists()
