"""Operations on stores: verify them, and try refused samples again."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    files = sorted({path.name for path in shard_paths(directory)} | listed.keys())

    def checked(file: str) -> DamagedShard | None:
        return _damage(directory / file, listed.get(file))

    with ThreadPoolExecutor() as pool:
        found = pool.map(checked, files)
        yield from filter(None, tracked(found, "verify", "shards", total=len(files), shown=progress))


def _damage(path: Path, listed: tuple[int, int] | None) -> DamagedShard | None:
    """Read a shard and return what is wrong with it; `listed` has its bytes and checksum in the manifest."""
    try:
        if listed is not None:
            check_shard(path, listed[0])
        shard = ShardFile(path)
        altered = list(shard.altered_samples())
        same = listed is None or shard.record().checksum == listed[1]
    except DamagedShard as error:
        return error
    if not altered and same:
        return None
    what = f"Samples {altered} were altered" if altered else "Its list of samples was altered"
    return DamagedShard(str(path), "damaged", f"{what}; delete it and run again with the capture stage.")
