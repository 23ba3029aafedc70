"""Operations on complete stores: describe them, verify them, and try refused samples again."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.progress import tracked
from data.store.index import MANIFEST, REFUSED, SETTINGS, missing_ids, read_index, read_manifest, refused
from data.store.shards import DamagedShard, FinishedShards, ShardFile, ShardRecord, check_shard, shard_paths
from eagle31.errors import UserError
from eagle31.json_files import read_json_object


@dataclass(frozen=True)
class Contents:
    """The contents of a store's directory, finished or not."""

    settings: dict[str, Any]  # the target, the dataset and the codec of the capture
    records: list[ShardRecord]
    refused: dict[int, str]
    missing: list[int]
    finished: bool

    @property
    def is_damaged(self) -> bool:
        """Whether the store was finished and samples are missing: shards are gone."""
        return self.finished and bool(self.missing)

    @staticmethod
    def read(directory: Path) -> "Contents":
        """Read the contents; raise UserError where the directory holds no store."""
        settings, records = _read_settings(directory), FinishedShards(directory).records()
        missing = missing_ids(directory, records, settings["dataset_samples"])
        return Contents(settings, records, refused(directory), missing, read_manifest(directory) is not None)


def retry(directory: Path) -> dict[int, str]:
    """Forget which samples were refused, so that the next run captures them; return their reasons.

    Raises:
        UserError: the directory holds no store.
    """
    forgotten = Contents.read(directory).refused
    if forgotten:
        # First the manifest, which says that the store is finished without them.
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory / REFUSED)
    return forgotten


def _read_settings(directory: Path) -> dict[str, Any]:
    path = directory / SETTINGS
    if not path.exists():
        raise UserError("STORE", directory, f"The directory holds no store: {SETTINGS} is missing.")
    return read_json_object(path)


def damage(directory: Path, progress: bool = False) -> Iterator[UserError]:
    """Read every shard and yield what is wrong with it or with the index.

    Raises:
        UserError: the directory holds no store.
    """
    _read_settings(directory)
    manifest = read_manifest(directory)
    listed = {}
    if manifest:
        listed = {file: (num_bytes, checksum) for file, num_bytes, checksum in manifest["shards"]}
        try:
            read_index(directory, manifest)
        except DamagedShard as error:
            yield error
    found = {path.name for path in shard_paths(directory)}
    for file in tracked(sorted(found | listed.keys()), "verify", "shards", shown=progress):
        path = directory / file
        try:
            if file in listed:
                check_shard(path, listed[file][0])
            shard = ShardFile(path)
            altered = list(shard.altered_samples())
            same = file not in listed or shard.record().checksum == listed[file][1]
        except DamagedShard as error:
            yield error
            continue
        if altered or not same:
            what = f"Samples {altered} were altered" if altered else "Its list of samples was altered"
            remedy = f"{what}; delete it and run again with the capture stage."
            yield DamagedShard(str(path), "damaged", remedy)
