"""The samples that a store holds and their locations: a manifest for people and an index for programs."""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.store.shards import SHARD_NAME, DamagedShard, FinishedShards, ShardRecord
from eagle31.errors import UserError
from eagle31.json_files import read_json, read_json_object, replacing, write_json

FORMAT = 5
# The version of what the states are; part of the fingerprint of a capture.
STATES_VERSION = 3
SETTINGS = "capture.json"
MANIFEST = "manifest.json"
INDEX = "index.npy"
REFUSED = "refused"
# A sample's shard, by its place in the manifest, and its rows there: tokens, aux states, final-layer states.
_ENTRY = np.dtype(
    [("sample_id", "i8"), ("shard", "i4"), ("starts", "i8", 3), ("rows", "i8", 3), ("checksum", "i8")]
)


def claim(directory: Path, settings: Mapping[str, Any], rank: int = 0) -> None:
    """Write down what a directory is for, before its store is finished.

    Args:
        settings: the manifest's fields as they read back from JSON, with `codec`, `tokens_fingerprint` and
            `dataset_samples`.

    Raises:
        UserError: the directory is for another capture.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / SETTINGS
    if path.exists():
        found = read_json_object(path)
        changed = sorted(key for key in found.keys() | settings.keys() if found.get(key) != settings.get(key))
        if changed:
            remedy = f"Holds a capture with another {', '.join(changed)}; delete it or choose another."
            raise UserError("output_dir", directory, remedy)
    elif rank == 0:
        write_json(path, settings)


def refuse(directory: Path, sample_id: int, reason: str) -> None:
    """Record that a sample cannot be captured; it counts as done."""
    write_json(directory / REFUSED / f"{sample_id}.json", reason)


def refused(directory: Path) -> dict[int, str]:
    """Return the reasons of refused samples, by sample id, ascending."""
    paths = {int(path.stem): path for path in (directory / REFUSED).glob("[0-9]*.json")}
    return {sample_id: read_json(paths[sample_id]) for sample_id in sorted(paths)}


def missing_ids(directory: Path, records: Sequence[ShardRecord], num_samples: int) -> list[int]:
    """Return the ids in 0 .. num_samples - 1 that are in no shard and not refused, ascending."""
    missing = np.ones(num_samples, dtype=bool)
    for record in records:
        missing[record.ids] = False
    missing[[int(path.stem) for path in (directory / REFUSED).glob("[0-9]*.json")]] = False
    return np.flatnonzero(missing).tolist()


def write_manifest(shards: FinishedShards, fields: Mapping[str, Any]) -> None:
    """Declare the store finished: write the index, then the manifest.

    The first shard that has a sample counts. Shards whose samples are all in earlier ones are not listed.

    Args:
        fields: what the states were made with: target, revision, fingerprints, layer ids, dtype, codec.
    """
    directory, records, entries = shards.directory, shards.records(), [np.empty(0, _ENTRY)]
    for number, record in enumerate(records):
        entries.append(np.empty(len(record.ids), _ENTRY))
        own = entries[-1]
        own["sample_id"], own["shard"], own["rows"] = record.ids, number, record.rows
        own["starts"], own["checksum"] = record.rows.cumsum(axis=0) - record.rows, record.checksums
    every = np.concatenate(entries)
    captured, first = np.unique(every["sample_id"], return_index=True)
    index = every[first]
    used, index["shard"] = np.unique(index["shard"], return_inverse=True)
    listed = [records[number] for number in used]
    with replacing(directory / INDEX) as file:
        np.save(file, index)
    reasons = refused(directory)
    content = {
        "format": FORMAT,
        **fields,
        "num_samples": len(index),
        "num_tokens": int(index["rows"][:, 0].sum()),
        "num_bytes": sum(record.num_bytes for record in listed),
        "num_shards": len(listed),
        "refused": {str(key): reasons[key] for key in sorted(reasons.keys() - set(captured.tolist()))},
        "index_checksum": file_checksum(directory / INDEX),
        "shards": [[record.file, record.num_bytes, record.checksum] for record in listed],
    }
    write_json(directory / MANIFEST, content)


def describes(directory: Path, fields: Mapping[str, Any]) -> bool:
    """Return whether the manifest has these fields, its shards are there, and its index is intact.

    There may be other shards, with duplicates that were written after the manifest.

    Args:
        fields: as they read back from JSON.
    """
    try:
        manifest = read_manifest(directory)
        if manifest is None or any(manifest.get(key) != value for key, value in fields.items()):
            return False
        read_index(directory, manifest)
    except UserError:  # it was damaged
        return False
    return {file for file, *_ in manifest["shards"]} <= set(os.listdir(directory))


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest, or None while the store is unfinished.

    Raises:
        UserError: it is damaged, of another version, or names files outside of the store.
    """
    path = Path(directory) / MANIFEST
    if not path.exists():
        return None
    manifest = read_json_object(path)
    if manifest.get("format") != FORMAT:
        found = manifest.get("format")
        raise UserError("capture", path, f"It has format {found}, not {FORMAT}; delete it and capture again.")
    for file, *_ in manifest["shards"]:
        if not SHARD_NAME.fullmatch(file):  # The store may come from others, and name a file outside of it.
            remedy = (
                f"It names {file!r}, which is no name of a shard; delete this manifest and capture again."
            )
            raise UserError("capture", path, remedy)
    return manifest


def read_index(directory: Path, manifest: Mapping[str, Any]) -> NDArray:
    """Return the entries of the samples by ascending id, mapped: the processes of a machine share the memory.

    Raises:
        DamagedShard: the index is missing or altered.
    """
    path = Path(directory) / INDEX
    if not path.is_file() or file_checksum(path) != manifest["index_checksum"]:
        remedy = "The index is missing or altered; run again with the capture stage, which makes it again."
        raise DamagedShard(str(path), None, remedy)
    index: NDArray = np.load(path, mmap_mode="r")
    return index


def file_checksum(path: Path) -> int:
    """Return the crc32 of a whole file."""
    return zlib.crc32(path.read_bytes())


def as_read_back(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object as it reads back from JSON, which has no tuples."""
    return json.loads(json.dumps(content))
