"""The samples that a store holds and their locations: a manifest for people and an index for programs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray

from data.store.shards import DamagedShard, FinishedShards, ShardRecord, file_sha256, refused, write_tensors
from eagle31.errors import UserError
from eagle31.json_files import read_json, write_json

FORMAT = 3
SETTINGS = "capture.json"
MANIFEST = "manifest.json"
INDEX = "index.safetensors"


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
        changed = differing(read_json(path), settings)
        if changed:
            remedy = f"Holds a capture with another {', '.join(changed)}; delete it or choose another."
            raise UserError("output_dir", directory, remedy)
    elif rank == 0:
        write_json(path, settings)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ."""
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def missing_ids(directory: Path, records: Sequence[ShardRecord], num_samples: int) -> list[int]:
    """Return the ids in 0 .. num_samples - 1 that are in no shard and not refused, ascending.

    Raises:
        UserError: the store holds a larger id.
    """
    done = np.zeros(num_samples, dtype=bool)
    for ids in (*(record.sample_ids for record in records), tuple(refused(directory))):
        if ids and max(ids) >= num_samples:
            remedy = f"Holds sample {max(ids)} of a dataset that has {num_samples}; delete it."
            raise UserError("output_dir", directory, remedy)
        done[list(ids)] = True
    return np.flatnonzero(~done).tolist()


def build_index(records: Sequence[ShardRecord]) -> dict[str, NDArray]:
    """Return the location of each of N samples, by ascending id. The first shard that has a sample counts.

    Returns:
        sample_ids int64 [N], shards int32 [N], and for the shard's tokens, aux states and final-layer states
        starts int64 [N, 3] and rows int32 [N, 3].
    """
    ids = [np.asarray(record.sample_ids, dtype=np.int64) for record in records]
    rows = [
        np.stack([record.lengths, record.aux_rows, record.last_rows], axis=1).astype(np.int64)
        for record in records
    ]
    starts = [shard_rows.cumsum(axis=0) - shard_rows for shard_rows in rows]
    shards = np.repeat(np.arange(len(records), dtype=np.int32), [len(shard_ids) for shard_ids in ids])
    sample_ids, first = np.unique(np.concatenate([*ids, np.empty(0, np.int64)]), return_index=True)
    none = np.empty((0, 3), np.int64)
    return {
        "sample_ids": sample_ids,
        "shards": shards[first],
        "starts": np.concatenate([*starts, none])[first],
        "rows": np.concatenate([*rows, none])[first].astype(np.int32),
    }


def manifest_content(
    directory: Path, records: Sequence[ShardRecord], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of these shards as it reads back, without the index's checksum."""
    rows = build_index(records)["rows"]
    captured = {sample_id for record in records for sample_id in record.sample_ids}
    content = {
        "format": FORMAT,
        **fields,
        "num_samples": len(rows),
        "num_tokens": int(rows[:, 0].sum()),
        "num_bytes": sum(record.num_bytes for record in records),
        "shards": [record.summary for record in records],
        "refused": [
            {"sample_id": sample_id, "reason": reason}
            for sample_id, reason in refused(directory).items()
            if sample_id not in captured
        ],
    }
    return as_read_back(content)


def write_manifest(
    directory: Path, fields: Mapping[str, Any], records: Sequence[ShardRecord] | None = None
) -> None:
    """Declare the store finished: write the index, then the manifest.

    Args:
        fields: what the states were made with: target, revision, fingerprints, layer ids, dtype, encoding.
        records: the shards, by name; by default all that are finished now. Of those whose samples are all in
            earlier ones, the manifest lists none.
    """
    records = FinishedShards(directory).records() if records is None else records
    counting = np.unique(build_index(records)["shards"])
    records = [records[index] for index in counting]
    arrays = build_index(records)
    sha256, _ = write_tensors(directory / INDEX, {n: [torch.from_numpy(a)] for n, a in arrays.items()})
    content = manifest_content(directory, records, fields)
    write_json(directory / MANIFEST, {**content, "index_sha256": sha256})


def describes(directory: Path, fields: Mapping[str, Any], records: Sequence[ShardRecord]) -> bool:
    """Return whether the manifest has these fields and lists only these shards, and its index is intact.

    There may be other shards, with duplicates that were written after the manifest.
    """
    manifest = read_manifest(directory)
    if manifest is None or any(manifest.get(name) != value for name, value in as_read_back(fields).items()):
        return False
    present = {(record.file, record.sha256, record.num_bytes) for record in records}
    if any((one["file"], one["sha256"], one["num_bytes"]) not in present for one in manifest["shards"]):
        return False
    path = directory / INDEX
    return path.exists() and file_sha256(path) == manifest["index_sha256"]


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest, or None while the store is unfinished.

    Raises:
        UserError: another version of eagle31 wrote it.
    """
    path = Path(directory) / MANIFEST
    if not path.exists():
        return None
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        remedy = f"The store has format {manifest.get('format')}, not {FORMAT}; delete it and capture again."
        raise UserError("capture", path, remedy)
    return manifest


def read_index(directory: Path, manifest: Mapping[str, Any]) -> dict[str, NDArray]:
    """Return the index; raise DamagedShard where it is missing or altered."""
    path = Path(directory) / INDEX
    if not path.exists() or file_sha256(path) != manifest["index_sha256"]:
        remedy = "The index is missing or altered; run again with the capture stage, which makes it again."
        raise DamagedShard(str(path), None, remedy)
    return safetensors.numpy.load_file(path)


def as_read_back(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object as it reads back from JSON, which has no tuples."""
    return json.loads(json.dumps(content))
