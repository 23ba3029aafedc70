"""Operations on stores: verify them, and try refused samples again."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.progress import tracked
from data.store.index import MANIFEST, REFUSED, SETTINGS, read_index, read_manifest, refused
from data.store.shards import DamagedShard, ShardFile, check_shard, shard_paths
from eagle31.errors import UserError
from eagle31.json_files import read_json_object


def retry(directory: Path) -> dict[int, str]:
    """Forget which samples were refused, so that the next run captures them; return their reasons.

    Raises:
        UserError: the directory holds no store.
    """
    read_settings(directory)
    forgotten = refused(directory)
    if forgotten:
        # First the manifest, which says that the store is finished without them.
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory / REFUSED)
    return forgotten


def read_settings(directory: Path) -> dict[str, Any]:
    """Return what a store is for, finished or not; raise UserError where the directory holds none."""
    path = directory / SETTINGS
    if not path.exists():
        raise UserError("STORE", directory, f"The directory holds no store: {SETTINGS} is missing.")
    return read_json_object(path)


def damage(directory: Path, progress: bool = False) -> Iterator[UserError]:
    """Read every shard and yield what is wrong with it or with the index.

    Raises:
        UserError: the directory holds no store.
    """
    read_settings(directory)
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
