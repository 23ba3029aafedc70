"""Operations on complete stores: describe them, verify them, and try refused samples again."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.progress import tracked
from data.store.codec import Encoding
from data.store.index import (
    MANIFEST,
    SETTINGS,
    ShardEntry,
    ShardTable,
    missing_ids,
    read_index,
    read_manifest,
    read_settings,
)
from data.store.shards import (
    DamagedShard,
    FinishedShards,
    ShardRecord,
    check_content,
    check_sidecar,
    check_size,
    forget_refusals,
    read_sidecar,
    refused,
)
from eagle31.errors import UserError


@dataclass(frozen=True)
class Contents:
    """The contents of a store's directory, finished or not."""

    directory: Path
    settings: dict[str, Any]  # the target, the dataset and the encoding of the capture
    records: list[ShardRecord]
    refused: dict[int, str]
    missing: list[int]
    finished: bool

    @property
    def encoding(self) -> Encoding:
        return Encoding(**self.settings["encoding"])

    @property
    def is_damaged(self) -> bool:
        """Whether the store was finished and samples are missing: shards or their sidecars are gone."""
        return self.finished and bool(self.missing)

    @staticmethod
    def read(directory: Path) -> "Contents":
        """Read the contents; raise UserError where the directory holds no store, or a sidecar is damaged."""
        settings, records = _read_settings(directory), FinishedShards(directory).records()
        missing = missing_ids(directory, records, settings["dataset_samples"])
        finished = read_manifest(directory) is not None
        return Contents(directory, settings, records, refused(directory), missing, finished)


def retry(directory: Path) -> dict[int, str]:
    """Forget which samples were refused, so that the next run captures them; return their reasons.

    Raises:
        UserError: the directory holds no store.
    """
    forgotten = Contents.read(directory).refused
    if forgotten:
        # First the manifest, which says that the store is finished without them.
        (directory / MANIFEST).unlink(missing_ok=True)
        forget_refusals(directory)
    return forgotten


def _read_settings(directory: Path) -> dict[str, Any]:
    path = directory / SETTINGS
    if not path.exists():
        raise UserError("STORE", directory, f"The directory holds no store: {SETTINGS} is missing.")
    return read_settings(directory)


def damage(directory: Path, progress: bool = False) -> Iterator[UserError]:
    """Read every shard and yield what is wrong with it, with its sidecar or with the index.

    Raises:
        UserError: the directory holds no store.
    """
    _read_settings(directory)
    manifest = read_manifest(directory)
    listed: dict[str, ShardEntry] = {}
    if manifest:
        try:
            listed = {shard.file: shard for shard in ShardTable(read_index(directory, manifest))}
        except DamagedShard as error:
            yield error
    sidecars = {path.with_suffix(".safetensors").name for path in directory.glob("shard-*.json")}
    files = sorted(sidecars | listed.keys())
    for file in tracked(files, "verify", "shards", shown=progress):
        try:
            _check(directory, file, listed.get(file))
        except UserError as error:
            yield error


def _check(directory: Path, file: str, listed: ShardEntry | None) -> None:
    if listed:
        check_size(directory, file, listed.num_bytes)
        check_content(directory, file, listed.checksum)
    record = read_sidecar((directory / file).with_suffix(".json"))
    if not listed:
        check_size(directory, file, record.num_bytes)
    if not listed or record.checksum != listed.checksum:
        check_content(directory, file, record.checksum)
    check_sidecar(directory, record)
