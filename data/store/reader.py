"""The reader of a finished store, in the order of its samples."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data.file_hashes import sha256_of_files
from data.progress import tracked
from data.samples import CapturedSample
from data.store.codec import decode
from data.store.index import MANIFEST, ShardTable, read_index, read_manifest
from data.store.shard_file import ShardFile
from data.store.shards import DamagedShard, check_content, check_size, open_shard
from eagle31.errors import UserError

# Open files of a reader: a process may have 1,024 by default.
_MAX_OPEN_SHARDS = 128


class SampleReader:
    """Reads the encoded samples of some shards by their position in the index, in any number of threads.

    Shards are opened on first use, and those that were not used for longest are closed again.

    Args:
        index: from `read_index` or `build_index`.
        locate: returns the local path of a shard's file by its name; by default it is in the directory.
    """

    def __init__(
        self,
        directory: Path,
        index: Mapping[str, NDArray],
        *,
        locate: Callable[[str], Path] | None = None,
        max_open_shards: int = _MAX_OPEN_SHARDS,
    ) -> None:
        self._directory = Path(directory)
        self._locate = locate or self._directory.joinpath
        self._index, self._table = index, ShardTable(index)
        self._max_open_shards = max_open_shards
        self._lock = threading.Lock()  # guards the field below
        self._open_shards: OrderedDict[int, ShardFile] = OrderedDict()

    def encoded(self, index: int) -> dict[str, Tensor]:
        """Return a sample's tensors after comparing their checksum.

        Raises:
            DamagedShard: the shard is missing, or the sample was altered.
        """
        shard = int(self._index["shards"][index])
        starts, rows = self._index["starts"][index].tolist(), self._index["rows"][index].tolist()
        expected = int(self._index["checksums"][index])
        file = self._open(shard)
        try:
            tensors, checksum = file.read(starts, rows, checked=expected >= 0)
        except OSError as error:
            raise self._damaged(shard, index, str(error)) from error
        if checksum is not None and checksum != expected:
            raise self._damaged(shard, index, f"its checksum was {expected} and is {checksum}")
        return tensors

    def _open(self, shard: int) -> ShardFile:
        with self._lock:
            found = self._open_shards.get(shard)
            if found is not None:
                self._open_shards.move_to_end(shard)
                return found
        opened = open_shard(self._locate(self._table.file(shard)))
        with self._lock:
            self._open_shards[shard] = opened
            while len(self._open_shards) > self._max_open_shards:
                # A thread that is reading from it keeps it open.
                self._open_shards.popitem(last=False)
        return opened

    def _damaged(self, shard: int, index: int, what: str) -> DamagedShard:
        path = self._directory / self._table.file(shard)
        sample_id = int(self._index["sample_ids"][index])
        remedy = f"The sample was altered ({what}); delete the shard and run again with the capture stage: "
        return DamagedShard(
            str(path), f"sample {sample_id}", f"{remedy}only the shard's samples are captured again."
        )


class HiddenStateStore:
    """Reads a finished store. Samples are in the order of their ids.

    Opening reads the manifest and maps the index. A sample is compared with its checksum when it is read.

    Raises:
        DamagedShard: the index is damaged.
        UserError: the store has no manifest.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        manifest = read_manifest(self.directory)
        if manifest is None:
            remedy = (
                f"It has no {MANIFEST}: the capture is unfinished; run it again to resume where it stopped."
            )
            raise UserError("capture", self.directory, remedy)
        self.manifest = manifest
        index = read_index(self.directory, manifest)
        self.shards = ShardTable(index)
        self.sample_ids: NDArray[np.int64] = index["sample_ids"]  # in the tokenised dataset; ascending
        self.lengths: NDArray[np.int64] = index["rows"][:, 0].astype(np.int64)
        self.files: NDArray[np.int32] = index["shards"]  # the shard of each sample
        self._reader = SampleReader(self.directory, index)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> CapturedSample:
        return decode(self._reader.encoded(index))

    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]:
        return [self[index] for index in indices]

    def verify(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        num_processes: int = 1,
        cache_dir: Path | None = None,
        progress: bool = False,
    ) -> None:
        """Check this rank's part of the shards, as far as reading a sample does not.

        A shard with checksums of its samples has to be there with its size. Shards of earlier versions are
        read, unless they have not changed since their last verification on this machine.

        Args:
            num_processes: the number of ranks on this machine, which share its cores.
            cache_dir: the directory in which verified shards are remembered, by default that of
                `cache_directory`.

        Raises:
            DamagedShard: a shard is missing or was altered.
        """
        shards = self.shards[rank::world_size]
        for shard in shards:
            check_size(self.directory, shard.file, shard.num_bytes)
        unchecked = [shard for shard in shards if shard.checksum is None]
        found = sha256_of_files(
            [self.directory / shard.file for shard in unchecked],
            num_processes=num_processes,
            cache_dir=cache_dir,
        )
        with closing(found):
            for shard in tracked(unchecked, "verify", "shards", shown=progress and bool(unchecked)):
                check_content(self.directory, shard.file, None, shard.sha256, next(found))
