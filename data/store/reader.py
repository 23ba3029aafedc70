"""The reader of a finished store, in the order of its samples."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from data.file_hashes import sha256_of_files
from data.progress import tracked
from data.samples import CapturedSample
from data.store.codec import ROWS_OF, decode
from data.store.index import MANIFEST, read_index, read_manifest
from data.store.shards import check_content, check_size
from eagle31.errors import UserError

_KINDS = ("tokens", "aux", "final")


class SampleReader:
    """Reads the encoded samples of some shards by their position in the index; maps files on first use.

    Args:
        files: the shards that `index`, from `build_index`, refers to.
    """

    def __init__(self, directory: Path, files: Sequence[str], index: Mapping[str, NDArray]) -> None:
        self._paths = [Path(directory) / file for file in files]
        self._index = index
        self._files: dict[int, tuple[Any, list[str]]] = {}

    def encoded(self, index: int) -> dict[str, Tensor]:
        file, names = self._open(int(self._index["shards"][index]))
        starts = self._index["starts"][index]
        stops = starts + self._index["rows"][index]
        bounds = zip(_KINDS, starts.tolist(), stops.tolist(), strict=True)
        slices = {kind: slice(start, stop) for kind, start, stop in bounds}
        return {name: file.get_slice(name)[slices[ROWS_OF[name]]] for name in names}

    def _open(self, shard: int) -> tuple[Any, list[str]]:
        if shard not in self._files:
            file = safe_open(self._paths[shard], framework="pt").__enter__()
            self._files[shard] = file, [name for name in file.keys() if name in ROWS_OF]  # noqa: SIM118
        return self._files[shard]


class HiddenStateStore:
    """Reads a finished store. Samples are in the order of their ids.

    Raises:
        DamagedShard: a shard is missing or has changed its size, or the index is damaged.
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
        self.shards: list[dict[str, Any]] = manifest["shards"]
        for shard in self.shards:
            check_size(self.directory, shard["file"], shard["num_bytes"])
        index = read_index(self.directory, manifest)
        self.sample_ids: list[int] = index["sample_ids"].tolist()  # in the tokenised dataset; ascending
        self.lengths: list[int] = index["rows"][:, 0].tolist()
        self.files: NDArray = index["shards"]  # the shard of each sample, int32 [num_samples]
        self._reader = SampleReader(self.directory, [shard["file"] for shard in self.shards], index)

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
        """Compare the checksums of this rank's part of the shards.

        A shard that has not changed since its last verification on this machine is not read again.

        Args:
            num_processes: the number of ranks on this machine, which share its cores.
            cache_dir: the directory in which verified shards are remembered, by default that of
                `cache_directory`.

        Raises:
            DamagedShard: a shard was altered.
        """
        shards = self.shards[rank::world_size]
        found = sha256_of_files(
            [self.directory / shard["file"] for shard in shards], num_processes=num_processes
        )
        with closing(found):
            for shard in tracked(shards, "verify", "shards", shown=progress):
                check_content(self.directory, shard["file"], shard["sha256"], next(found))
