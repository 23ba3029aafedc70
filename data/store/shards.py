"""One file of a store: samples laid end to end in safetensors, and a sidecar that vouches for them."""

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
_AGAIN = "run again with the capture stage: only it is captured anew."
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
    """A shard of a finished store is missing or altered; it can be captured anew alone."""


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard's sidecar; the lists are as long as there are samples."""

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
        """For the manifest, which does not grow with the samples."""
        sums = {"num_samples": len(self.sample_ids), "num_tokens": sum(self.lengths)}
        return {"file": self.file, "sha256": self.sha256, "num_bytes": self.num_bytes, **sums}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "ShardRecord":
        lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        return ShardRecord(**{**content, **lists, "encoding": Encoding(**content["encoding"])})


def split_name(file: str) -> tuple[str, int]:
    """A shard's writer and number."""
    found = SHARD_NAME.fullmatch(file)
    assert found, file
    return found["writer"], int(found["number"])


def write_shard(
    path: Path, encoding: Encoding, samples: Sequence[tuple[int, Mapping[str, Tensor]]]
) -> ShardRecord:
    """Writes a shard, then its sidecar: without the sidecar the shard does not exist.

    Args:
        path: named as `SHARD_NAME`.
        samples: ids, and what `encode` made of each, on the CPU.

    Raises:
        OSError: such as a full disk; nothing is left behind.
    """
    ids = tuple(sample_id for sample_id, _ in samples)
    rows = [Rows(*(len(tensors[name]) for name in ("input_ids", *STATES))) for _, tensors in samples]
    columns = {name: [tensors[name] for _, tensors in samples] for name in samples[0][1]}
    # The shard tells by itself what is in it; the sidecar is held against that.
    columns["sample_ids"] = [torch.tensor(ids)]
    columns["rows"] = [torch.tensor([[r.tokens, r.aux, r.last] for r in rows], dtype=torch.int32)]
    sha256, num_bytes = write_tensors(path, columns)
    record = ShardRecord(
        path.name,
        sha256,
        num_bytes,
        encoding,
        ids,
        lengths=tuple(r.tokens for r in rows),
        aux_rows=tuple(r.aux for r in rows),
        last_rows=tuple(r.last for r in rows),
    )
    write_text(path.with_suffix(".json"), json.dumps(asdict(record)) + "\n")
    return record


def write_tensors(path: Path, columns: Mapping[str, Sequence[Tensor]]) -> tuple[str, int]:
    """Writes a safetensors file of tensors that lie in pieces, joined along their first dimension.

    In one pass that copies nothing, takes the checksum on its way and leaves other threads to run, where
    safetensors' own writer does none of these. The file appears once it is on disk.

    Returns:
        sha256, and the size in bytes.
    """
    # As safetensors lays it out: wide types first, so that all are aligned.
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
    """Source: the safetensors format, https://github.com/huggingface/safetensors#format."""
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
    """The name of the shard is to last before that of its sidecar."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_sidecar(path: Path) -> ShardRecord:
    """Raises UserError for one that is damaged."""
    try:
        return ShardRecord.from_json(read_json(path))
    except (TypeError, KeyError, AttributeError):
        remedy = "Is no shard's sidecar of this version; delete it with its shard and capture again."
        raise UserError("capture", path, remedy) from None


class FinishedShards:
    """Follows which shards of a directory are finished, however many write there."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._seen: dict[tuple[str, int], ShardRecord] = {}

    def records(self) -> list[ShardRecord]:
        """Those whose sidecar is there and whose file has the size it says, by name."""
        with os.scandir(self.directory) as entries:
            stats = {entry.name: entry.stat() for entry in entries if entry.name.startswith("shard-")}
        # A sidecar may be one of the same name that was written anew.
        sidecars = [
            (name, stat.st_mtime_ns) for name, stat in sorted(stats.items()) if name.endswith(".json")
        ]
        self._seen = {key: self._seen.get(key) or read_sidecar(self.directory / key[0]) for key in sidecars}
        sizes = {name: stat.st_size for name, stat in stats.items()}
        return [record for record in self._seen.values() if sizes.get(record.file) == record.num_bytes]


def captured_ids(directory: Path) -> set[int]:
    """The samples in finished shards."""
    return {sample_id for record in FinishedShards(directory).records() for sample_id in record.sample_ids}


def refuse(directory: Path, name: str, sample_id: int, reason: str) -> None:
    """Records that a sample cannot be captured; it counts as done.

    Args:
        name: of the writer.
    """
    content = {"sample_id": sample_id, "reason": reason, "writer": name}
    write_json(Path(directory) / REFUSED / f"{sample_id}.json", content)


def refused(directory: Path) -> dict[int, str]:
    """The reasons, by sample id."""
    contents = [read_json(path) for path in (Path(directory) / REFUSED).glob("[0-9]*.json")]
    return dict(sorted((content["sample_id"], content["reason"]) for content in contents))


def check_size(directory: Path, file: str, num_bytes: int) -> None:
    """Raises DamagedShard when the shard is gone or of another size."""
    path = directory / file
    if not path.exists():
        raise DamagedShard(str(path), None, f"The shard is gone; {_AGAIN}")
    found = path.stat().st_size
    if found != num_bytes:
        raise DamagedShard(str(path), f"{found} bytes", f"The shard had {num_bytes} bytes; {_AGAIN}")


def check_content(directory: Path, file: str, sha256: str) -> None:
    """Raises DamagedShard when the shard was altered."""
    path = directory / file
    found = file_sha256(path)
    if found != sha256:
        what = f"The shard's sha256 was {sha256}"
        raise DamagedShard(str(path), found, f"{what}; delete it and {_AGAIN}")


def check_sidecar(directory: Path, record: ShardRecord) -> None:
    """Raises DamagedShard when the sidecar says other samples than the shard itself."""
    path = directory / record.file
    with safe_open(path, framework="np") as file:
        ids, rows = file.get_tensor("sample_ids"), file.get_tensor("rows")
    told = np.stack([record.lengths, record.aux_rows, record.last_rows], axis=1)
    if not (np.array_equal(ids, record.sample_ids) and np.array_equal(rows, told)):
        sidecar = path.with_suffix(".json").name
        raise DamagedShard(str(path), sidecar, f"The two name other samples; delete both and {_AGAIN}")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
