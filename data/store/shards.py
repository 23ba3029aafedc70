"""One file of a store: concatenated samples in safetensors, with a sidecar that holds their checksum."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from data.store.codec import STATES, Encoding, Rows
from eagle31.errors import UserError
from eagle31.json_files import read_json, write_json, write_text

REFUSED = "refused"
SHARD_NAME = re.compile(r"shard-(?P<writer>.+)-(?P<number>\d{5,})\.safetensors")
_READ_BYTES = 1 << 22
_AGAIN = "run again with the capture stage: only this shard is captured again."
_DTYPES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class DamagedShard(UserError):
    """A shard of a finished store is missing or altered; it can be captured again on its own."""


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard's sidecar. The lists have one item per sample."""

    file: str
    sha256: str
    num_bytes: int
    encoding: Encoding
    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens
    aux_rows: tuple[int, ...]
    last_rows: tuple[int, ...]

    @cached_property
    def writer(self) -> str:
        return split_name(self.file)[0]

    @property
    def summary(self) -> dict[str, Any]:
        """The fields for the manifest, whose size does not depend on the number of samples."""
        sums = {"num_samples": len(self.sample_ids), "num_tokens": sum(self.lengths)}
        return {"file": self.file, "sha256": self.sha256, "num_bytes": self.num_bytes, **sums}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "ShardRecord":
        lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        return ShardRecord(**{**content, **lists, "encoding": Encoding(**content["encoding"])})


def split_name(file: str) -> tuple[str, int]:
    """Return a shard's writer and number."""
    found = SHARD_NAME.fullmatch(file)
    assert found, file
    return found["writer"], int(found["number"])


def write_shard(
    path: Path, encoding: Encoding, samples: Sequence[tuple[int, Mapping[str, Tensor]]]
) -> ShardRecord:
    """Write a shard, then its sidecar: a shard without a sidecar does not count.

    Args:
        path: a path whose name matches `SHARD_NAME`.
        samples: ids, and the tensors of `encode` for each, on the CPU.

    Raises:
        OSError: the disk is full, for example; no file is left then.
    """
    ids = tuple(sample_id for sample_id, _ in samples)
    rows = [Rows(*(len(tensors[name]) for name in ("input_ids", *STATES))) for _, tensors in samples]
    columns = {name: [tensors[name] for _, tensors in samples] for name in samples[0][1]}
    # The shard also says which samples it holds, so that the sidecar can be compared with it.
    columns["sample_ids"] = [torch.tensor(ids)]
    columns["rows"] = [torch.tensor([[r.tokens, r.aux, r.final] for r in rows], dtype=torch.int32)]
    sha256, num_bytes = write_tensors(path, columns)
    record = ShardRecord(
        path.name,
        sha256,
        num_bytes,
        encoding,
        ids,
        lengths=tuple(r.tokens for r in rows),
        aux_rows=tuple(r.aux for r in rows),
        last_rows=tuple(r.final for r in rows),
    )
    write_text(path.with_suffix(".json"), json.dumps(asdict(record)) + "\n")
    return record


def write_tensors(path: Path, columns: Mapping[str, Sequence[Tensor]]) -> tuple[str, int]:
    """Write a safetensors file of tensors that are given in pieces, concatenated along the first dimension.

    A single pass copies nothing, computes the checksum and lets other threads run, none of which safetensors'
    own writer does. The file appears once it is on disk.

    Returns:
        The sha256, and the size in bytes.
    """
    # In safetensors' order: wide types first, so that all are aligned.
    names = sorted(columns, key=lambda name: (-columns[name][0].element_size(), name))
    partial = path.with_name(f".{path.name}.partial")
    digest = hashlib.sha256()
    try:
        with open(partial, "wb") as file:
            blocks: list[bytes | memoryview] = [_header(names, columns)]
            blocks += [_bytes(piece) for name in names for piece in columns[name]]
            for block in blocks:
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            num_bytes = file.tell()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(path.parent)
    return digest.hexdigest(), num_bytes


def _header(names: Sequence[str], columns: Mapping[str, Sequence[Tensor]]) -> bytes:
    """Return the file's header.

    Source: the safetensors format, https://github.com/huggingface/safetensors#format.
    """
    header, start = {}, 0
    for name in names:
        first = columns[name][0]
        stop = start + sum(piece.nbytes for piece in columns[name])
        shape = [sum(len(piece) for piece in columns[name]), *first.shape[1:]]
        alike = {(piece.dtype, piece.shape[1:]) for piece in columns[name]}
        assert len(alike) == 1, f"{name}: {alike}"
        header[name] = {"dtype": _DTYPES[first.dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _sync_directory(directory: Path) -> None:
    """Make the shard's name durable before its sidecar is written."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_sidecar(path: Path) -> ShardRecord:
    """Read a sidecar; raise UserError where it is damaged."""
    try:
        return ShardRecord.from_json(read_json(path))
    except (TypeError, KeyError, AttributeError):
        remedy = "The file is no shard's sidecar of this version; delete it with its shard and capture again."
        raise UserError("capture", path, remedy) from None


class FinishedShards:
    """The finished shards of a directory, to which any number of processes may be writing."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._seen: dict[tuple[str, int], ShardRecord] = {}

    def records(self) -> list[ShardRecord]:
        """Return, by name, the shards that have a sidecar and the size that it states."""
        with os.scandir(self.directory) as entries:
            stats = {entry.name: entry.stat() for entry in entries if entry.name.startswith("shard-")}
        # A sidecar may have been written again under the same name.
        sidecars = [
            (name, stat.st_mtime_ns) for name, stat in sorted(stats.items()) if name.endswith(".json")
        ]
        self._seen = {key: self._seen.get(key) or read_sidecar(self.directory / key[0]) for key in sidecars}
        sizes = {name: stat.st_size for name, stat in stats.items()}
        return [record for record in self._seen.values() if sizes.get(record.file) == record.num_bytes]


def captured_ids(directory: Path) -> set[int]:
    """Return the ids of the samples in finished shards."""
    return {sample_id for record in FinishedShards(directory).records() for sample_id in record.sample_ids}


def refuse(directory: Path, name: str, sample_id: int, reason: str) -> None:
    """Record that a sample cannot be captured; it counts as done.

    Args:
        name: the writer's name.
    """
    content = {"sample_id": sample_id, "reason": reason, "writer": name}
    write_json(Path(directory) / REFUSED / f"{sample_id}.json", content)


def refused(directory: Path) -> dict[int, str]:
    """Return the reasons of refused samples, by sample id."""
    contents = [read_json(path) for path in (Path(directory) / REFUSED).glob("[0-9]*.json")]
    return dict(sorted((content["sample_id"], content["reason"]) for content in contents))


def check_size(directory: Path, file: str, num_bytes: int) -> None:
    """Raise DamagedShard where the shard is missing or has another size."""
    path = directory / file
    if not path.exists():
        raise DamagedShard(str(path), None, f"The shard is gone; {_AGAIN}")
    found = path.stat().st_size
    if found != num_bytes:
        raise DamagedShard(str(path), f"{found} bytes", f"The shard had {num_bytes} bytes; {_AGAIN}")


def check_content(directory: Path, file: str, sha256: str, found: str | None = None) -> None:
    """Raise DamagedShard where the shard was altered.

    Args:
        sha256: the checksum that was recorded.
        found: the file's checksum, if it is known; otherwise the file is read.
    """
    path = directory / file
    found = found or file_sha256(path)
    if found != sha256:
        what = f"The shard's sha256 was {sha256}"
        raise DamagedShard(str(path), found, f"{what}; delete it and {_AGAIN}")


def check_sidecar(directory: Path, record: ShardRecord) -> None:
    """Raise DamagedShard where the sidecar names other samples than the shard itself."""
    path = directory / record.file
    with safe_open(path, framework="np") as file:
        ids, rows = file.get_tensor("sample_ids"), file.get_tensor("rows")
    expected = np.stack([record.lengths, record.aux_rows, record.last_rows], axis=1)
    if not (np.array_equal(ids, record.sample_ids) and np.array_equal(rows, expected)):
        sidecar = path.with_suffix(".json").name
        raise DamagedShard(str(path), sidecar, f"The two name other samples; delete both and {_AGAIN}")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
