"""Copying a finished store to object storage or to another file system."""

import os
import shutil
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Protocol

from data.addresses import is_url
from data.progress import Progress
from data.store.index import INDEX, MANIFEST, SETTINGS, ShardTable, read_index, read_manifest, read_settings
from data.store.remote import RemoteDirectory
from data.store.shards import REFUSED, check_content, check_sidecar, read_sidecar
from eagle31.errors import UserError

_NUM_THREADS = 4


class _Destination(Protocol):
    def sizes(self) -> dict[str, int]: ...
    def upload(self, path: Path, name: str) -> None: ...


class _Directory:
    """A directory that receives files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def sizes(self) -> dict[str, int]:
        return {entry.name: entry.stat().st_size for entry in os.scandir(self._directory) if entry.is_file()}

    def upload(self, path: Path, name: str) -> None:
        target = self._directory / name
        target.parent.mkdir(exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        try:
            shutil.copyfile(path, partial)
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def copy_store(store: Path, output: str, progress: bool = False) -> tuple[int, int]:
    """Copy a finished store, and resume where an earlier copy stopped.

    Each shard is compared with its checksum before it is copied. The manifest is copied last, so that an
    unfinished copy is no store.

    Args:
        output: a directory, or a URL such as s3://bucket/path.

    Returns:
        The number of shards that were copied, and their size in bytes.

    Raises:
        UserError: the store is unfinished or damaged, or the output holds another store.
    """
    manifest = read_manifest(store)
    if manifest is None:
        remedy = f"It has no {MANIFEST}: the store is unfinished, or it is none; finish its capture first."
        raise UserError("STORE", store, remedy)
    if not (store / SETTINGS).exists():
        raise UserError("STORE", store, f"It has lost its {SETTINGS}; restore it, or capture again.")
    read_settings(store)
    if not is_url(output) and Path(output).resolve() == store.resolve():
        raise UserError("OUT", output, "This is the store itself; choose another directory.")
    shards = ShardTable(read_index(store, manifest))
    destination: _Destination = RemoteDirectory(output) if is_url(output) else _Directory(Path(output))
    there = destination.sizes()
    names = {shard.file for shard in shards}
    if strange := sorted(name for name in there if name.startswith("shard-") and _shard(name) not in names):
        raise UserError("OUT", output, f"It holds another store ({strange[0]}); choose another place.")
    # A manifest that is there describes another state of the store until all else is copied.
    missing = [shard for shard in shards if there.get(shard.file) != shard.num_bytes]

    def copy(index: int) -> int:
        shard = missing[index]
        check_content(store, shard.file, shard.checksum, shard.sha256)
        check_sidecar(store, read_sidecar((store / shard.file).with_suffix(".json")))
        for path in (store / shard.file, (store / shard.file).with_suffix(".json")):
            destination.upload(path, path.name)
        return shard.num_bytes

    num_bytes = 0
    bar = Progress(f"copy to {output}", sum(shard.num_bytes for shard in missing), "bytes", shown=progress)
    with bar, closing(_in_threads(copy, len(missing))) as copied:
        for size in copied:
            num_bytes += size
            bar.update(size)
    refusals = sorted(f"{REFUSED}/{path.name}" for path in (store / REFUSED).glob("*.json"))
    for name in (*refusals, SETTINGS, INDEX, MANIFEST):
        destination.upload(store / name, name)
    return len(missing), num_bytes


def _shard(name: str) -> str:
    return str(Path(name).with_suffix(".safetensors"))


def _in_threads(task: Callable[[int], int], number: int) -> Generator[int, None, None]:
    """Yield the results of several threads in order; no further task starts after an error."""
    pool = ThreadPoolExecutor(_NUM_THREADS, "copy-store")
    try:
        yield from pool.map(task, range(number))
    finally:
        pool.shutdown(cancel_futures=True)
