"""Hashes of whole files: what they cover, and when a remembered one is used."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from data import file_hashes
from data.file_hashes import hash_files, sha256_of_files
from eagle31.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PIECE = 1 << 12
TICK_SECONDS = 0.02  # longer than the tick of a file system's clock


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The pieces that were read, where pieces are small and files of any size are remembered."""
    found: list[tuple[str, int]] = []
    read = file_hashes._hash_piece

    def noted(path: Path, offset: int) -> tuple[bytes, int]:
        found.append((path.name, offset))
        return read(path, offset)

    monkeypatch.setattr(file_hashes, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(file_hashes, "_REMEMBERED_BYTES", 1)
    monkeypatch.setattr(file_hashes, "_SETTLED_NANOSECONDS", 0)
    monkeypatch.setattr(file_hashes, "_hash_piece", noted)
    return found


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "weights" / name for name in ("a.safetensors", "b.safetensors")]
    files[0].parent.mkdir()
    files[0].write_bytes(os.urandom(5 * PIECE + 7))
    files[1].write_bytes(b"")
    return files


def _remembered_hashes(weights: list[Path], cache: Path, reads: list) -> list[str]:
    hashes = hash_files(weights, cache_dir=cache)
    reads.clear()
    assert hash_files(weights, cache_dir=cache) == hashes
    assert not reads
    return hashes


def test_the_hash_is_that_of_all_pieces_for_any_number_of_threads(
    weights: list[Path], tmp_path: Path, reads: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = weights[0].read_bytes()
    pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    whole = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    empty = hashlib.sha256(hashlib.sha256(b"").digest()).hexdigest()
    for num_threads in (1, 5):
        monkeypatch.setattr(file_hashes, "_num_cores", lambda num=num_threads: num)
        assert hash_files(weights, cache_dir=tmp_path / str(num_threads)) == [whole, empty]
    assert len(reads) == 2 * (6 + 1)


def test_every_byte_counts(weights: list[Path], tmp_path: Path, reads: list) -> None:
    content = bytearray(weights[0].read_bytes())
    found = {hash_files(weights[:1], cache_dir=tmp_path)[0]}
    places = (0, PIECE - 1, PIECE, 2 * PIECE + 99, len(content) - 1)
    for place in places:
        content[place] ^= 1
        time.sleep(TICK_SECONDS)
        weights[0].write_bytes(content)
        found |= set(hash_files(weights[:1], cache_dir=tmp_path))
    assert len(found) == 1 + len(places)


def _replace_in_place(path: Path) -> None:
    """Write other content of the same size, and set the modification time back."""
    before = path.stat()
    path.write_bytes(os.urandom(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (
        before.st_size,
        before.st_ino,
        before.st_mtime_ns,
    )


def _rename_over(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(os.urandom(path.stat().st_size))
    os.replace(other, path)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("change", [_replace_in_place, _rename_over, _append])
def test_only_a_changed_file_is_read_again(
    weights: list[Path], tmp_path: Path, reads: list, change: Callable[[Path], None]
) -> None:
    weights[1].write_bytes(b"other")
    first, second = _remembered_hashes(weights, tmp_path, reads)
    time.sleep(TICK_SECONDS)
    change(weights[0])
    changed, same = hash_files(weights, cache_dir=tmp_path)
    assert (changed != first, same) == (True, second)
    assert {name for name, _ in reads} == {"a.safetensors"}


def test_a_damaged_memory_is_made_again(weights: list[Path], tmp_path: Path, reads: list) -> None:
    hashes = _remembered_hashes(weights, tmp_path, reads)
    [memory] = (tmp_path / "file_hashes").glob("*.json")
    for damage in ("", "{", "[1]", '{"x": 1}', json.dumps({str(weights[0]): [["x"], "y"]})):
        memory.write_text(damage)
        assert hash_files(weights, cache_dir=tmp_path) == hashes
        reads.clear()
        assert hash_files(weights, cache_dir=tmp_path) == hashes
        assert not reads


def test_links_to_one_file_are_one_file(weights: list[Path], tmp_path: Path, reads: list) -> None:
    [expected] = hash_files(weights[:1], cache_dir=tmp_path)
    reads.clear()
    link = weights[0].with_name("link.safetensors")
    link.symlink_to(weights[0])
    assert hash_files([link, weights[0]], cache_dir=tmp_path) == [expected] * 2
    assert not reads


def test_a_file_that_was_just_written_is_not_remembered(
    weights: list[Path], tmp_path: Path, reads: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next write may fall into the same tick of the file system's clock."""
    monkeypatch.setattr(file_hashes, "_SETTLED_NANOSECONDS", 10**12)
    for _ in range(2):
        reads.clear()
        hash_files(weights, cache_dir=tmp_path)
        assert len(reads) == 7


def test_a_file_that_changes_while_it_is_read_is_a_user_error(
    weights: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = file_hashes._hash_piece

    def changing(path: Path, offset: int) -> tuple[bytes, int]:
        found = read(path, offset)
        _append(path)
        return found

    monkeypatch.setattr(file_hashes, "_hash_piece", changing)
    with pytest.raises(UserError, match="changed while it was read"):
        hash_files(weights, cache_dir=tmp_path)


def test_a_cache_that_cannot_be_written_costs_only_the_memory(
    weights: list[Path], tmp_path: Path, reads: list, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = hash_files(weights, cache_dir=tmp_path)
    (tmp_path / "file").touch()
    assert hash_files(weights, cache_dir=tmp_path / "file") == expected
    assert "hashes are not remembered" in capsys.readouterr().err


def test_progress_is_shown_in_gigabytes(
    weights: list[Path],
    tmp_path: Path,
    reads: list,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(file_hashes, "_GB", PIECE)
    monkeypatch.setattr(file_hashes, "_SHOWN_BYTES", 1)
    monkeypatch.setattr("data.progress.FIRST_LINE_SECONDS", 0.0)
    hash_files(weights[:1], cache_dir=tmp_path)
    assert "fingerprint: 1/5 GB (20%)" in capsys.readouterr().err


def test_of_several_processes_one_reads_the_files(weights: list[Path], tmp_path: Path) -> None:
    weights[0].write_bytes(os.urandom(50 * PIECE))
    script = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from data import file_hashes
file_hashes._PIECE_BYTES, file_hashes._REMEMBERED_BYTES, file_hashes._SETTLED_NANOSECONDS = {PIECE}, 1, 0
read, count = file_hashes._hash_piece, []
def slow(path, offset):
    count.append(offset)
    time.sleep(0.02)
    return read(path, offset)
file_hashes._hash_piece = slow
print("ready", flush=True)
sys.stdin.readline()
[found] = file_hashes.hash_files([Path({str(weights[0])!r})], cache_dir=Path({str(tmp_path)!r}))
print(len(count), found)
"""
    command = [sys.executable, "-c", script]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs: list[str] = []
    readers = [
        threading.Thread(target=lambda process=process: outputs.append(process.communicate("\n", 60)[0]))
        for process in processes
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert sorted(int(line.split()[0]) for line in outputs) == [0, 0, 50]
    assert len({line.split()[1] for line in outputs}) == 1


@pytest.fixture
def digested(reads: list, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that `sha256_of_files` has read."""
    found: list[str] = []
    digest = file_hashes._whole_sha256

    def noted(path: Path) -> str:
        found.append(path.name)
        return digest(path)

    monkeypatch.setattr(file_hashes, "_whole_sha256", noted)
    return found


def test_checksums_of_several_processes_are_remembered_together(
    weights: list[Path], tmp_path: Path, digested: list[str]
) -> None:
    weights[1].write_bytes(b"other")
    expected = [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights]
    with closing(sha256_of_files(weights[:1], cache_dir=tmp_path)) as first:
        assert next(first) == expected[0]
        # Another process reads other files of the directory meanwhile, without waiting.
        assert list(sha256_of_files(weights[1:], cache_dir=tmp_path, num_processes=2)) == expected[1:]
    assert sorted(digested) == ["a.safetensors", "b.safetensors"]
    digested.clear()
    assert list(sha256_of_files(weights, cache_dir=tmp_path)) == expected
    assert not digested
    time.sleep(TICK_SECONDS)
    _replace_in_place(weights[0])
    changed, same = sha256_of_files(weights, cache_dir=tmp_path)
    assert (changed, same) == (hashlib.sha256(weights[0].read_bytes()).hexdigest(), expected[1])
    assert digested == ["a.safetensors"]
    # Hashes in pieces are another kind, and remembered apart.
    assert hash_files(weights[:1], cache_dir=tmp_path) != [changed]
