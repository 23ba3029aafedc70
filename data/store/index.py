"""The samples that a store holds and their locations: a manifest for people and an index for programs."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray

from data.store.shard_file import MAX_HEADER_BYTES, file_checksum, write_tensors
from data.store.shards import (
    SHARD_NAME,
    DamagedShard,
    FinishedShards,
    ShardRecord,
    refused,
    refused_ids,
)
from eagle31.errors import UserError
from eagle31.json_files import read_json_object, read_sealed_json, write_sealed_json
from eagle31.tensor_files import read_header

FORMAT = 4
# The version of what the states are; part of the fingerprint of a capture.
STATES_VERSION = 3
SETTINGS = "capture.json"
MANIFEST = "manifest.json"
INDEX = "index.safetensors"
_INDEX_DTYPES = {"I64": np.int64, "I32": np.int32, "U8": np.uint8}


def claim(directory: Path, settings: Mapping[str, Any], rank: int = 0) -> None:
    """Write down what a directory is for, before its store is finished.

    Args:
        settings: the manifest's fields, with `encoding`, `tokens_fingerprint` and `dataset_samples`.

    Raises:
        UserError: the directory is for another capture.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path, settings = directory / SETTINGS, as_read_back(settings)
    if path.exists():
        changed = differing(read_settings(directory), settings)
        if changed:
            remedy = f"Holds a capture with another {', '.join(changed)}; delete it or choose another."
            raise UserError("output_dir", directory, remedy)
    elif rank == 0:
        write_sealed_json(path, settings)


def read_settings(directory: Path) -> dict[str, Any]:
    """Return what a directory is for.

    Raises:
        UserError: it is damaged, or no description of a store.
        OSError: there is none.
    """
    path = directory / SETTINGS
    settings = read_sealed_json(path)
    missing = {"encoding", "tokens_fingerprint", "dataset_samples"} - settings.keys()
    if missing:
        remedy = f"It lacks {', '.join(sorted(missing))}: it was damaged; restore it, or capture again."
        raise UserError("capture", path, remedy)
    return settings


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ."""
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def missing_ids(directory: Path, records: Sequence[ShardRecord], num_samples: int) -> list[int]:
    """Return the ids in 0 .. num_samples - 1 that are in no shard and not refused, ascending.

    Raises:
        UserError: the store holds a larger id.
    """
    done = np.zeros(num_samples, dtype=bool)
    ids = np.concatenate([*(record.ids for record in records), np.array(refused_ids(directory), np.int64)])
    if len(ids) and ids.max() >= num_samples:
        remedy = f"Holds sample {ids.max()} of a dataset that has {num_samples}; delete it."
        raise UserError("output_dir", directory, remedy)
    done[ids] = True
    return np.flatnonzero(~done).tolist()


def build_index(records: Sequence[ShardRecord]) -> dict[str, NDArray]:
    """Return where each of N samples is, by ascending id. The first shard that has a sample counts.

    Returns:
        sample_ids int64 [N], shards int32 [N], and for the shard's tokens, aux states and final-layer states
        starts int64 [N, 3] and rows int32 [N, 3]; checksums int64 [N]. Of each of S shards: shard_files
        uint8 [S, W], the names padded with zeros; shard_bytes int64 [S]; shard_checksums int64 [S].
    """
    ids, rows = [record.ids for record in records], [record.rows for record in records]
    checksums = [record.checksums for record in records]
    names = np.array([record.file.encode() for record in records], dtype=bytes)
    starts = [shard_rows.cumsum(axis=0) - shard_rows for shard_rows in rows]
    shards = np.repeat(np.arange(len(records), dtype=np.int32), [len(shard_ids) for shard_ids in ids])
    sample_ids, first = np.unique(np.concatenate([*ids, np.empty(0, np.int64)]), return_index=True)
    none = np.empty((0, 3), np.int64)
    return {
        "sample_ids": sample_ids,
        "shards": shards[first],
        "starts": np.concatenate([*starts, none])[first],
        "rows": np.concatenate([*rows, none])[first].astype(np.int32),
        "checksums": np.concatenate([*checksums, np.empty(0, np.int64)])[first],
        "shard_files": names.view(np.uint8).reshape(len(records), names.itemsize),
        "shard_bytes": np.array([record.num_bytes for record in records], dtype=np.int64),
        "shard_checksums": np.array([record.checksum for record in records], dtype=np.int64),
    }


class ShardEntry(NamedTuple):
    """What a finished store knows about a shard."""

    file: str
    num_bytes: int
    checksum: int


class ShardTable(Sequence[ShardEntry]):
    """The shards of a finished store. index: from `read_index` or `build_index`."""

    def __init__(self, index: Mapping[str, NDArray]) -> None:
        self._index = index

    def __len__(self) -> int:
        return len(self._index["shard_bytes"])

    @overload
    def __getitem__(self, index: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[ShardEntry]: ...
    def __getitem__(self, index: int | slice) -> ShardEntry | list[ShardEntry]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        sizes, checksums = self._index["shard_bytes"], self._index["shard_checksums"]
        return ShardEntry(self.file(index), int(sizes[index]), int(checksums[index]))

    def file(self, index: int) -> str:
        """Return a shard's name. Raises DamagedShard for what is none, such as a path."""
        name = self._index["shard_files"][index].tobytes().rstrip(b"\0").decode(errors="replace")
        if not SHARD_NAME.fullmatch(name):
            remedy = "The index has a name that is no shard's; run again with the capture stage."
            raise DamagedShard(name, None, remedy)
        return name


def write_manifest(
    directory: Path, fields: Mapping[str, Any], records: Sequence[ShardRecord] | None = None
) -> None:
    """Declare the store finished: write the index, then the manifest.

    Args:
        fields: what the states were made with: target, revision, fingerprints, layer ids, dtype, encoding.
        records: the shards, by name; by default all that are finished now. Of those whose samples are all in
            earlier ones, the manifest counts none.
    """
    records = FinishedShards(directory).records() if records is None else records
    counting = np.unique(build_index(records)["shards"])
    records = [records[index] for index in counting]
    index = build_index(records)
    write_tensors(directory / INDEX, {name: [torch.tensor(array)] for name, array in index.items()})
    captured, reasons = index["sample_ids"], refused(directory)
    left_out = np.setdiff1d(np.fromiter(reasons, np.int64, len(reasons)), captured).tolist()
    content = {
        "format": FORMAT,
        **fields,
        "num_samples": len(captured),
        "num_tokens": int(index["rows"][:, 0].sum(dtype=np.int64)),
        "num_bytes": sum(record.num_bytes for record in records),
        "num_shards": len(records),
        "refused": [{"sample_id": sample_id, "reason": reasons[sample_id]} for sample_id in left_out],
        "index_checksum": file_checksum(directory / INDEX),
    }
    write_sealed_json(directory / MANIFEST, content)


def describes(
    directory: Path, fields: Mapping[str, Any], records: Sequence[ShardRecord] | None = None
) -> bool:
    """Return whether the manifest has these fields and lists only these shards, and its index is intact.

    There may be other shards, with duplicates that were written after the manifest.

    Args:
        records: the shards that are there; by default the listed shards have to be in the directory, which
            takes one listing and reads no sidecar.
    """
    try:
        manifest = read_manifest(directory)
    except UserError as error:
        if error.field != "file":  # another version wrote it
            raise
        return False
    if manifest is None or any(manifest.get(name) != value for name, value in as_read_back(fields).items()):
        return False
    try:
        listed = ShardTable(read_index(directory, manifest))
    except DamagedShard:
        return False
    if records is None:
        return {listed.file(index) for index in range(len(listed))} <= set(os.listdir(directory))
    present = {(one.file, one.num_bytes, one.checksum) for one in records}
    return all(shard in present for shard in listed)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest, or None while the store is unfinished.

    Raises:
        UserError: it is damaged, or of another version.
    """
    path = Path(directory) / MANIFEST
    if not path.exists():
        return None
    found = read_json_object(path).get("format")
    if found != FORMAT:
        raise UserError("capture", path, f"It has format {found}, not {FORMAT}; delete it and capture again.")
    manifest = read_sealed_json(path)
    return manifest


def read_index(directory: Path, manifest: Mapping[str, Any]) -> dict[str, NDArray]:
    """Return the arrays of `build_index`, mapped from the file: the processes of a machine share its memory.

    Raises:
        DamagedShard: the index is missing or altered.
    """
    path = Path(directory) / INDEX
    if not path.is_file() or file_checksum(path) != manifest["index_checksum"]:
        remedy = "The index is missing or altered; run again with the capture stage, which makes it again."
        raise DamagedShard(str(path), None, remedy)
    with path.open("rb") as file:
        entries = read_header(file, path, MAX_HEADER_BYTES)
    mapped = np.asarray(np.memmap(path, np.uint8, "r"))
    return {
        name: mapped[entry.start : entry.stop].view(_INDEX_DTYPES[entry.dtype]).reshape(entry.shape)
        for name, entry in entries.items()
    }


def as_read_back(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object as it reads back from JSON, which has no tuples."""
    return json.loads(json.dumps(content))
