"""Samples of a store that is slow to read, kept on a local disk for the next epochs."""

import errno
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from data.store.shard_file import ShardFile, file_order, header, new_memory, shard_columns, tensor_bytes
from eagle31.errors import UserError

_SAMPLES_PER_DIRECTORY = 1000


@dataclass(frozen=True)
class CacheSettings:
    """Where samples are kept, and how many bytes of them by all processes together."""

    directory: Path
    limit_bytes: int
    num_processes: int = 1  # that fill the cache at the same time; each adds an equal share


class SampleCache:
    """Encoded samples in local files, up to a limit. Any number of threads and processes can use it.

    Samples are kept until the cache is full, and none is replaced. An epoch reads each sample once, so the
    sample that was used last is needed last: replacing the oldest would lose the hits of a cache that is
    smaller than the store. Nothing is synced to the disk, as every sample is compared with its checksum.

    Args:
        directory: a directory on a local disk, for samples of one store only.
        limit_bytes, num_processes: those of `CacheSettings`.

    Raises:
        UserError: the directory cannot be written.
    """

    def __init__(self, directory: Path, limit_bytes: int, num_processes: int = 1) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            used = sum(
                entry.stat().st_size
                for group in os.scandir(self.directory)
                if group.is_dir()
                for entry in os.scandir(group)
            )
        except OSError as error:
            remedy = f"The cache cannot be used: {error.strerror}; choose another directory."
            raise UserError("capture.cache_dir", directory, remedy) from None
        self._room = (limit_bytes - used) / num_processes
        self._lock = threading.Lock()  # guards the field above

    @staticmethod
    def of_store(settings: CacheSettings, manifest: Mapping[str, Any]) -> "SampleCache":
        """Return the cache of a store's samples. Stores with other samples have other directories.

        Raises:
            UserError: an earlier version wrote the store, without checksums of samples.
        """
        if "index_checksum" not in manifest:
            remedy = "The store was written by an earlier version; write it again with scripts/store merge."
            raise UserError("capture.cache_dir", settings.directory, remedy)
        name = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:32]
        return SampleCache(settings.directory / name, settings.limit_bytes, settings.num_processes)

    def read(
        self, sample_id: int, rows: Sequence[int], allocate: Callable[[int], Tensor] = new_memory
    ) -> tuple[dict[str, Tensor], int] | None:
        """Return an encoded sample and its checksum, or None where it is not kept or its file is damaged.

        Args:
            rows, allocate: as for `ShardFile.read`.
        """
        try:
            tensors, checksum = ShardFile(self._path(sample_id)).read((0, 0, 0), rows, allocate=allocate)
        except (OSError, UserError):
            return None
        assert checksum is not None
        return tensors, checksum

    def keep(self, sample_id: int, tensors: Mapping[str, Tensor]) -> None:
        """Add an encoded sample if there is room. A full disk ends the adding, and nothing else."""
        columns = shard_columns([(sample_id, tensors)])
        blocks: list[bytes | memoryview] = [
            header(columns),
            *(tensor_bytes(columns[name][0]) for name in file_order(columns)),
        ]
        num_bytes = sum(map(len, blocks))
        with self._lock:
            if num_bytes > self._room:
                return
            self._room -= num_bytes
        path = self._path(sample_id)
        partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
        try:
            path.parent.mkdir(exist_ok=True)
            with open(partial, "wb") as file:
                for block in blocks:
                    file.write(block)
            partial.replace(path)
        except OSError as error:
            self._stop(error)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _stop(self, error: OSError) -> None:
        with self._lock:
            stopped, self._room = self._room < 0, -1.0
        if not stopped:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            what = "is full" if full else f"cannot be written ({error.strerror})"
            print(f"cache: {self.directory} {what}; no more samples are added", file=sys.stderr)

    def _path(self, sample_id: int) -> Path:
        group = sample_id // _SAMPLES_PER_DIRECTORY
        return self.directory / f"{group:06d}" / f"{sample_id}.safetensors"
