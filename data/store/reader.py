"""The reader of a finished store, in the order of its samples."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data.addresses import is_url
from data.samples import CapturedSample, StateShape
from data.store.codec import STATES, decode, decode_into, decoded_dtype
from data.store.index import MANIFEST, read_index, read_manifest
from data.store.shards import DamagedShard, ShardFile, check_shard, new_memory
from eagle31.errors import UserError

if TYPE_CHECKING:
    from data.store.remote import RemoteDirectory

# Open files of a reader: a process may have 1,024 by default.
_MAX_OPEN_SHARDS = 128


class _ThreadMemory(threading.local):
    """Memory of each thread for one encoded sample, because new memory is cleared before its use."""

    def __init__(self) -> None:
        self._memory = new_memory(0)

    def of_size(self, num_bytes: int) -> Tensor:
        """Return at least this much memory, which the next call may return again."""
        if len(self._memory) < num_bytes:
            self._memory = new_memory(num_bytes)
        return self._memory


def store_description(location: Path | str) -> dict[str, Any]:
    """Return a finished store's manifest without its shards.

    Args:
        location: its directory, or a URL.

    Raises:
        UserError: there is no finished store, or it cannot be reached.
    """
    manifest = read_manifest(_opened(location)[1])
    if manifest is None:
        raise UserError("capture.store", location, f"There is no {MANIFEST}: it is no finished store.")
    parts = {"format", "num_shards", "num_bytes", "index_checksum", "shards"}
    return {name: value for name, value in manifest.items() if name not in parts}


def _opened(location: Path | str) -> "tuple[RemoteDirectory | None, Path]":
    """Return a store's files elsewhere, if it is there, and a directory with its manifest and index."""
    if not is_url(location):
        return None, Path(location)
    # vLLM's processes import this module, and have no need for fsspec.
    from data.store.remote import RemoteDirectory, local_description

    remote = RemoteDirectory(str(location))
    return remote, local_description(remote)


class HiddenStateStore:
    """Reads a finished store. Samples are in the order of their ids.

    Opening reads the manifest and maps the index. A sample is compared with its checksum when it is read.

    Args:
        location: its directory, or a URL such as s3://bucket/path.
        num_threads: how many samples of `get_many` are read and decoded at the same time.
        given: whether the user gave the store, so that the run cannot capture its shards again.

    Raises:
        DamagedShard: the manifest is missing, or the index is damaged.
        UserError: the store cannot be reached, or is damaged and given.
    """

    def __init__(
        self,
        location: Path | str,
        *,
        num_threads: int = 1,
        given: bool = False,
    ) -> None:
        self.location, self._given = location, given
        self._remote, self.directory = _opened(location)
        manifest = read_manifest(self.directory)
        if manifest is None and given:
            remedy = (
                f"It has no {MANIFEST}: its capture is unfinished; finish it with the command of its run."
            )
            raise UserError("capture.store", location, remedy)
        if manifest is None:
            raise DamagedShard("capture", location, f"It has no {MANIFEST}; the same command captures it.")
        self.manifest = manifest
        with self._explained():
            self._index = read_index(self.directory, manifest)
        self.shards: list[tuple[str, int, int]] = manifest["shards"]  # names, sizes, checksums
        self.sample_ids: NDArray[np.int64] = self._index["sample_id"]  # in the tokenised dataset; ascending
        self.lengths: NDArray[np.int64] = self._index["rows"][:, 0]
        # Headers, 2 kB each, stay where no file is open. A thread that is reading from a shard keeps it open.
        most = _MAX_OPEN_SHARDS if self._remote is None else None
        self._open: Callable[[int], ShardFile] = lru_cache(most)(self._open_shard)
        self._memory = _ThreadMemory()
        self._threads = ThreadPoolExecutor(num_threads, "read-samples")

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> CapturedSample:
        with self._explained():
            return decode(self._encoded(index))

    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]:
        return list(self._threads.map(self.__getitem__, indices))

    @cached_property
    def state_shape(self) -> StateShape:
        """The shape and dtype of a token's decoded states."""
        with self._explained():
            tensors = self._open(0).read((0, 0, 0), (0, 0, 0))[0]
        return StateShape.of(tensors[STATES[0]], decoded_dtype(tensors))

    def read_into(self, indices: Sequence[int], places: Sequence[CapturedSample]) -> None:
        """Decode samples into tensors of the caller, with `num_threads` of them at the same time.

        For packed rows, this saves a copy of the states.
        """
        for _ in self._threads.map(self._read_into, indices, places):
            pass

    def _read_into(self, index: int, place: CapturedSample) -> None:
        with self._explained():
            decode_into(self._encoded(index, self._memory.of_size), place)

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Check that the shards are there with the sizes that were recorded.

        A rank checks its part of a local store. Of one elsewhere, rank 0 lists all shards at once.

        Raises:
            DamagedShard: a shard is missing or has another size.
            UserError: the same of a store that was given.
        """
        with self._explained():
            if self._remote is None:
                for file, num_bytes, _ in self.shards[rank::world_size]:
                    check_shard(self.directory / file, num_bytes)
            elif rank == 0:
                sizes = self._remote.sizes()
                for file, num_bytes, _ in self.shards:
                    if sizes.get(file) != num_bytes:
                        raise DamagedShard(file, sizes.get(file), f"It had {num_bytes} bytes.")

    def _encoded(self, index: int, allocate: Callable[[int], Tensor] = new_memory) -> dict[str, Tensor]:
        """Return a sample's tensors after comparing their checksum; raise DamagedShard where it differs.

        Args:
            allocate: returns uint8 memory for the tensors, of this size or larger.
        """
        entry = self._index[index]
        shard, expected = int(entry["shard"]), int(entry["checksum"])
        try:
            tensors, checksum = self._open(shard).read(
                entry["starts"].tolist(), entry["rows"].tolist(), allocate=allocate
            )
        except OSError as error:
            what = str(error)
        else:
            if checksum == expected:
                return tensors
            what = f"its checksum was {expected} and is {checksum}"
        path = self.directory / self.shards[shard][0]
        remedy = (
            f"The sample was altered ({what}); delete the shard and run again with the capture stage: "
            "only the shard's samples are captured again."
        )
        raise DamagedShard(str(path), f"sample {entry['sample_id']}", remedy)

    def _open_shard(self, shard: int) -> ShardFile:
        name = self.shards[shard][0]
        return ShardFile(self.directory / name if self._remote is None else self._remote.file(name))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Give a damage its remedy where no shard can be captured again."""
        try:
            yield
        except DamagedShard as error:
            if not self._given:
                raise
            remedy = f"{error.field} is missing or altered ({error.value}); copy the store again."
            raise UserError("capture.store", self.location, remedy) from error
