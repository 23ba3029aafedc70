"""Which samples a store holds and where: the manifest, which people read, and the index beside it."""

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
    """Says what a directory is for, which is then known before the store is finished.

    Args:
        settings: as the manifest's fields, with `encoding`, `tokens_fingerprint` and `dataset_samples`.

    Raises:
        UserError: it is for something else.
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
    """The keys whose values are not the same in both."""
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def missing_ids(directory: Path, records: Sequence[ShardRecord], num_samples: int) -> list[int]:
    """Of 0 .. num_samples - 1, what neither these shards hold nor is refused; ascending.

    Raises:
        UserError: there is a sample beyond these.
    """
    done = np.zeros(num_samples, dtype=bool)
    for ids in (*(record.sample_ids for record in records), tuple(refused(directory))):
        if ids and max(ids) >= num_samples:
            remedy = f"Holds sample {max(ids)} of a dataset that has {num_samples}; delete it."
            raise UserError("output_dir", directory, remedy)
        done[list(ids)] = True
    return np.flatnonzero(~done).tolist()


def build_index(records: Sequence[ShardRecord]) -> dict[str, NDArray]:
    """Where each of N samples lies, by ascending id. A sample that several shards hold is the first one's.

    Returns:
        sample_ids int64 [N], shards int32 [N], and within the shard's tokens, aux and last-layer states
        starts int64 [N, 3] and rows int32 [N, 3].
    """
    ids = [np.asarray(record.sample_ids, dtype=np.int64) for record in records]
    rows = [
        np.stack([record.lengths, record.aux_rows, record.last_rows], axis=1).astype(np.int64)
        for record in records
    ]
    starts = [own.cumsum(axis=0) - own for own in rows]
    shards = np.repeat(np.arange(len(records), dtype=np.int32), [len(own) for own in ids])
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
    """What the manifest says of these shards, as it reads back, but for the index's checksum."""
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


def write_manifest(directory: Path, fields: Mapping[str, Any]) -> None:
    """Declares the store finished: writes the index, then the manifest.

    Args:
        fields: target, revision, fingerprints, layer ids, dtype, encoding: what the states were made with.
    """
    records = FinishedShards(directory).records()
    arrays = build_index(records)
    sha256, _ = write_tensors(directory / INDEX, {n: [torch.from_numpy(a)] for n, a in arrays.items()})
    content = manifest_content(directory, records, fields)
    write_json(directory / MANIFEST, {**content, "index_sha256": sha256})


def is_written(directory: Path, content: Mapping[str, Any]) -> bool:
    """Whether the manifest is there and says just this, and the index beside it is intact."""
    manifest = read_manifest(directory)
    if manifest is None or manifest | {"index_sha256": None} != {**content, "index_sha256": None}:
        return False
    path = directory / INDEX
    return path.exists() and file_sha256(path) == manifest["index_sha256"]


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest as written, or None while the store is unfinished.

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
    """Raises DamagedShard when it is missing or altered."""
    path = Path(directory) / INDEX
    if not path.exists() or file_sha256(path) != manifest["index_sha256"]:
        remedy = "The index is missing or altered; run again with the capture stage: it is made anew."
        raise DamagedShard(str(path), None, remedy)
    return safetensors.numpy.load_file(path)


def as_read_back(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples: what a written object is compared with."""
    return json.loads(json.dumps(content))
