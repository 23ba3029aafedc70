"""Hidden states on disk: sharded safetensors, a sidecar with checksums for each, one manifest at the end."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.samples import CapturedSample
from eagle31.errors import UserError
from eagle31.json_files import read_json, write_json

MANIFEST = "manifest.json"
_FORMAT = 1
_READ_BYTES = 1 << 22
_AGAIN = "run again with the capture stage: only it is captured anew."


class DamagedShard(UserError):
    """A shard of a finished store is missing or altered; it can be captured anew alone."""


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard's sidecar."""

    file: str
    sha256: str
    num_bytes: int
    lengths: tuple[int, ...]  # tokens of each sample


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[range]:
    """Consecutive samples of about `shard_tokens` tokens each, at least one sample.

    Depends on its arguments only, so any number of ranks, at any time, share one plan.
    """
    plan, start, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        if i > start and tokens + length > shard_tokens:
            plan.append(range(start, i))
            start, tokens = i, 0
        tokens += length
    if start < len(lengths):
        plan.append(range(start, len(lengths)))
    return plan


def write_shard(directory: Path, index: int, samples: Sequence[CapturedSample]) -> ShardRecord:
    """Writes one shard, then its sidecar: without the sidecar the shard does not exist."""
    lengths = tuple(len(sample.input_ids) for sample in samples)
    tensors = {
        "input_ids": torch.cat([sample.input_ids.to(torch.int32) for sample in samples]),
        "loss_mask": torch.cat([sample.loss_mask for sample in samples]),
        "aux_hidden_states": torch.cat([sample.aux_hidden_states for sample in samples]),
        "last_hidden_states": torch.cat([sample.last_hidden_states for sample in samples]),
        "lengths": torch.tensor(lengths),
    }
    path, sidecar = _shard_path(directory, index), _sidecar_path(directory, index)
    temporary = path.with_suffix(path.suffix + ".tmp")
    # Of a shard written again, the old sidecar must not vouch for the new file.
    sidecar.unlink(missing_ok=True)
    try:
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, temporary)
        record = ShardRecord(path.name, _sha256(temporary), temporary.stat().st_size, lengths)
        _publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    write_json(sidecar, asdict(record))
    return record


def finished_shards(directory: Path) -> dict[int, ShardRecord]:
    """The shards whose sidecar is there and whose file has the size it says, by index."""
    finished = {}
    for sidecar in sorted(directory.glob("shard-*.json")):
        record = _record(read_json(sidecar))
        path = directory / record.file
        if path.exists() and path.stat().st_size == record.num_bytes:
            finished[int(sidecar.stem.removeprefix("shard-"))] = record
    return finished


def missing_shards(directory: Path, lengths: Sequence[int], shard_tokens: int) -> list[int]:
    """The planned shards that are still to be captured.

    Raises:
        UserError: the directory holds a shard of other samples.
    """
    finished = finished_shards(directory)
    plan = plan_shards(lengths, shard_tokens)
    for index, record in finished.items():
        planned = tuple(lengths[i] for i in plan[index]) if index < len(plan) else None
        if record.lengths != planned:
            remedy = f"{record.file} there holds other samples; delete the directory or choose another."
            raise UserError("output_dir", directory, remedy)
    return [index for index in range(len(plan)) if index not in finished]


def manifest_content(directory: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says once every shard is finished, as it reads back."""
    records = [record for _, record in sorted(finished_shards(directory).items())]
    content = {
        "format": _FORMAT,
        **fields,
        "num_samples": sum(len(record.lengths) for record in records),
        "num_tokens": sum(sum(record.lengths) for record in records),
        "num_bytes": sum(record.num_bytes for record in records),
        "shards": [asdict(record) for record in records],
    }
    return as_read_back(content)


def write_manifest(directory: Path, fields: Mapping[str, Any]) -> None:
    """Declares the store finished.

    Args:
        fields: target, revision, fingerprints, layer ids and dtype: what the states were made with.
    """
    write_json(directory / MANIFEST, manifest_content(directory, fields))


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest as written, or None while the store is unfinished."""
    path = directory / MANIFEST
    return read_json(path) if path.exists() else None


class HiddenStateStore:
    """Reads a finished store; shards are memory-mapped when first touched.

    Raises:
        DamagedShard: one is missing or of another size than it had.
        UserError: the store has no manifest.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        manifest = read_manifest(self.directory)
        if manifest is None:
            remedy = f"Has no {MANIFEST}: the capture is unfinished; run it again to go on where it stopped."
            raise UserError("capture", self.directory, remedy)
        self.manifest = manifest
        self.records = [_record(shard) for shard in manifest["shards"]]
        for record in self.records:
            path = self.directory / record.file
            if not path.exists():
                raise DamagedShard(str(path), None, f"The shard is gone; {_AGAIN}")
            found = path.stat().st_size
            if found != record.num_bytes:
                what = f"The shard had {record.num_bytes} bytes"
                raise DamagedShard(str(path), f"{found} bytes", f"{what}; {_AGAIN}")
        self.lengths = [length for record in self.records for length in record.lengths]
        self._places = [
            (shard, sum(record.lengths[:i]), length)
            for shard, record in enumerate(self.records)
            for i, length in enumerate(record.lengths)
        ]
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> CapturedSample:
        shard, start, length = self._places[index]
        file = self._open(shard)

        def read(name: str) -> Tensor:
            return file.get_slice(name)[start : start + length]

        return CapturedSample(
            input_ids=read("input_ids").long(),
            loss_mask=read("loss_mask"),
            aux_hidden_states=read("aux_hidden_states"),
            last_hidden_states=read("last_hidden_states"),
        )

    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]:
        return [self[index] for index in indices]

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Reads this rank's share of the shards and compares their checksums.

        Raises:
            DamagedShard: one was altered; names it.
        """
        for record in self.records[rank::world_size]:
            path = self.directory / record.file
            found = _sha256(path)
            if found != record.sha256:
                what = f"The shard's sha256 was {record.sha256}"
                raise DamagedShard(str(path), found, f"{what}; delete it and {_AGAIN}")

    def _open(self, shard: int) -> Any:
        if shard not in self._files:
            path = self.directory / self.records[shard].file
            self._files[shard] = safe_open(path, framework="pt").__enter__()
        return self._files[shard]


def _shard_path(directory: Path, index: int) -> Path:
    return directory / f"shard-{index:05d}.safetensors"


def _sidecar_path(directory: Path, index: int) -> Path:
    return directory / f"shard-{index:05d}.json"


def _record(content: dict[str, Any]) -> ShardRecord:
    return ShardRecord(**content | {"lengths": tuple(content["lengths"])})


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _publish(temporary: Path, path: Path) -> None:
    """Renames only what has reached the disk, so that a crash leaves the whole file or none."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)


def as_read_back(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples: what a written object is compared with."""
    return json.loads(json.dumps(content))
