"""Hashes of whole files, computed on all cores and remembered until a file changes.

Hashes are remembered in the cache directory, in a JSON file for each directory of hashed files, by the
file's path, size, inode, and times of modification and change. A user can set the modification time back, as
`cp -p` does, and replace a file in place with one of the same size; the time of change (ctime) is set by the
kernel alone, at every write.
"""

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path

from data.cache import cache_directory
from data.progress import Progress
from eagle31.errors import UserError
from eagle31.json_files import write_json

# A file is hashed in pieces, so that all cores work on a single file, too.
_PIECE_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 22
_MAX_THREADS = 32
_REMEMBERED_BYTES = 1 << 28  # fewer bytes are hashed in less than a second
_SHOWN_BYTES = 4 * 10**9
_WRITE_SECONDS = 30.0  # between two writes of what was remembered, in case the process is killed
_SETTLED_NANOSECONDS = 2 * 10**9  # longer than the resolution of any file system's times
_GB = 10**9

_State = list[int]  # what changes with a file's content


def hash_files(files: Sequence[Path], *, cache_dir: Path | None = None) -> list[str]:
    """Return a hash of each file's whole content: 64 hexadecimal digits.

    The hash is the sha256 of the sha256 digests of the file's pieces of 64 MiB. Where several processes ask
    for the same large files, one of them reads the files and the others wait for the result.

    Args:
        files: in one directory, so that they are remembered together.
        cache_dir: the directory in which hashes are remembered, by default that of `cache_directory`.

    Raises:
        UserError: a file changed while it was read.
    """
    paths = [file.resolve() for file in files]
    if sum(path.stat().st_size for path in paths) < _REMEMBERED_BYTES:
        return _hash_missing(paths, {}, None)
    memory = _memory_of(paths[0].parent, "", cache_dir)
    with _locked(memory.with_suffix(".lock")) as writable:
        return _hash_missing(paths, _remembered(memory), memory if writable else None)


def sha256_of_files(
    files: Sequence[Path], *, num_processes: int = 1, cache_dir: Path | None = None
) -> Generator[str, None, None]:
    """Yield the sha256 of each file, in order, to compare with checksums that are recorded elsewhere.

    Unlike with `hash_files`, several processes can read different files of one directory at the same time.

    Args:
        files: in one directory, so that they are remembered together.
        num_processes: the number of processes on this machine that do this at the same time, and share its
            cores.
        cache_dir: the directory in which hashes are remembered, by default that of `cache_directory`.
    """
    started = time.time_ns()
    paths = [file.resolve() for file in files]
    states = {path: _state(path) for path in paths}
    memory = None
    if sum(state[0] for state in states.values()) >= _REMEMBERED_BYTES:
        memory = _memory_of(paths[0].parent, "-sha256", cache_dir)
    known = {} if memory is None else _remembered(memory)
    missing = [path for path in states if known.get(str(path), (None,))[0] != states[path]]
    new: dict[str, tuple[_State, str]] = {}
    pool = ThreadPoolExecutor(min(max(1, _num_cores() // num_processes), _MAX_THREADS))
    futures = {path: pool.submit(_whole_sha256, path) for path in missing}
    next_write = time.monotonic() + _WRITE_SECONDS
    try:
        for path in paths:
            if path not in futures:
                yield known[str(path)][1]
                continue
            digest = futures[path].result()
            settled = started - max(states[path][2:]) > _SETTLED_NANOSECONDS
            if settled and _state(path) == states[path]:
                new[str(path)] = (states[path], digest)
            if time.monotonic() >= next_write:
                _remember(memory, new)
                next_write = time.monotonic() + _WRITE_SECONDS
            yield digest
    finally:
        pool.shutdown(cancel_futures=True)
        _remember(memory, new)


def _remember(memory: Path | None, new: Mapping[str, tuple[_State, str]]) -> None:
    """Add states and hashes to those that other processes remember at the same time."""
    if memory is None or not new:
        return
    with _locked(memory.with_suffix(".lock")) as writable:
        if writable:
            write_json(memory, {**_remembered(memory), **new})


def _memory_of(directory: Path, kind: str, cache_dir: Path | None) -> Path:
    name = hashlib.sha256(str(directory).encode()).hexdigest()[:24]
    return (cache_dir or cache_directory()) / "file_hashes" / f"{name}{kind}.json"


def _hash_missing(
    paths: Sequence[Path], remembered: Mapping[str, tuple[_State, str]], memory: Path | None
) -> list[str]:
    """Return the hash of each file, read where it is not remembered for the file's state."""
    started = time.time_ns()
    states = {path: _state(path) for path in paths}
    found = {
        path: remembered[str(path)][1]
        for path in states
        if str(path) in remembered and remembered[str(path)][0] == states[path]
    }
    pieces = [
        (path, offset)
        for path, state in states.items()
        if path not in found
        # An empty file has one piece, too.
        for offset in range(0, max(state[0], 1), _PIECE_BYTES)
    ]
    num_bytes = sum(states[path][0] for path in {path for path, _ in pieces})
    num_done = 0
    pool = ThreadPoolExecutor(min(_num_cores(), _MAX_THREADS, max(len(pieces), 1)))
    progress = Progress("fingerprint", num_bytes // _GB, "GB", shown=num_bytes >= _SHOWN_BYTES)
    try:
        with progress:
            digests = zip(pieces, pool.map(lambda piece: _hash_piece(*piece), pieces), strict=True)
            for path, of_file in groupby(digests, key=lambda one: one[0][0]):
                whole = hashlib.sha256()
                for _, (digest, size) in of_file:
                    whole.update(digest)
                    progress.update((num_done + size) // _GB - num_done // _GB)
                    num_done += size
                if _state(path) != states[path]:
                    remedy = "The file changed while it was read; run again once it is complete."
                    raise UserError("file", path, remedy)
                found[path] = whole.hexdigest()
                # A later write may leave the times as they are if it follows too closely.
                settled = started - max(states[path][2:]) > _SETTLED_NANOSECONDS
                if memory is not None and settled:
                    remembered = {**remembered, str(path): (states[path], found[path])}
                    write_json(memory, remembered)
    finally:
        pool.shutdown(cancel_futures=True)
    return [found[path] for path in paths]


def _state(path: Path) -> _State:
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _hash_piece(path: Path, offset: int) -> tuple[bytes, int]:
    """Return a piece's sha256 and its size in bytes."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    size = 0
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while size < _PIECE_BYTES and (count := file.readinto(buffer[: _PIECE_BYTES - size])):
            digest.update(buffer[:count])
            size += count
    return digest.digest(), size


def _whole_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _remembered(memory: Path) -> dict[str, tuple[_State, str]]:
    """Return states and hashes by path; a damaged file is as good as none."""
    try:
        content = json.loads(memory.read_text(encoding="utf-8"))
        return {
            path: ([int(number) for number in state], digest)
            for path, (state, digest) in content.items()
            if len(digest) == 64 and os.path.exists(path)
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock out other processes that hash the same files; return whether the cache directory can be written.

    The kernel releases the lock of a process that dies.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        print(f"fingerprint: hashes are not remembered, because of {error}", file=sys.stderr)
        yield False
        return
    with file:
        with suppress(OSError):  # without locks, every process reads the files
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
