"""The shards of a store: a file of samples each, and a sidecar with their ids and checksums."""

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
from torch import Tensor

from data.store.codec import Encoding
from data.store.shard_file import (
    ROWS,
    SAMPLE_IDS,
    ShardFile,
    header,
    sample_checksum,
    sample_rows,
    shard_checksum,
    shard_columns,
    tensor_bytes,
    write_tensors,
)
from eagle31.errors import UserError
from eagle31.json_files import read_json, write_json, write_text

REFUSED = "refused"
SHARD_NAME = re.compile(r"shard-(?P<writer>.+)-(?P<number>\d{5,})\.safetensors")
_READ_BYTES = 1 << 22
_AGAIN = "run again with the capture stage: only this shard is captured again."


class DamagedShard(UserError):
    """A shard of a finished store is missing or altered; it can be captured again on its own."""


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard's sidecar. The lists have one item per sample.

    Shards of earlier versions have the file's sha256 instead of checksums.
    """

    file: str
    num_bytes: int
    encoding: Encoding
    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens
    aux_rows: tuple[int, ...]
    last_rows: tuple[int, ...]
    checksum: int | None = None
    checksums: tuple[int, ...] = ()
    sha256: str | None = None

    @cached_property
    def writer(self) -> str:
        return split_name(self.file)[0]

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "ShardRecord":
        lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        record = ShardRecord(**{**content, **lists, "encoding": Encoding(**content["encoding"])})
        expected = 0 if record.checksum is None else len(record.sample_ids)
        if (record.checksum is None) == (record.sha256 is None) or len(record.checksums) != expected:
            raise ValueError("it has no checksums")
        return record


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
    rows = [sample_rows(tensors) for _, tensors in samples]
    checksums = [sample_checksum(tensors) for _, tensors in samples]
    columns = shard_columns(samples)
    num_bytes = write_tensors(path, columns)
    [sample_ids], [row_counts] = columns[SAMPLE_IDS], columns[ROWS]
    checksum = shard_checksum(header(columns), tensor_bytes(sample_ids), tensor_bytes(row_counts), checksums)
    record = ShardRecord(
        path.name,
        num_bytes,
        encoding,
        sample_ids=tuple(sample_id for sample_id, _ in samples),
        lengths=tuple(r.tokens for r in rows),
        aux_rows=tuple(r.aux for r in rows),
        last_rows=tuple(r.final for r in rows),
        checksum=checksum,
        checksums=tuple(checksums),
    )
    write_text(path.with_suffix(".json"), json.dumps(record.to_json()) + "\n")
    return record


def read_sidecar(path: Path) -> ShardRecord:
    """Read a sidecar; raise DamagedShard where it is missing or damaged."""
    try:
        return ShardRecord.from_json(read_json(path))
    except FileNotFoundError:
        what = "The shard has lost its sidecar"
    except (TypeError, KeyError, AttributeError, ValueError):
        what = "The file is no shard's sidecar of this version"
    shard = path.with_suffix(".safetensors").name
    raise DamagedShard(str(path), None, f"{what}; delete it with {shard} and {_AGAIN}")


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


def forget_refusals(directory: Path) -> None:
    """Forget which samples were refused; they count as missing then."""
    for path in (Path(directory) / REFUSED).glob("[0-9]*.json"):
        path.unlink(missing_ok=True)


def check_size(directory: Path, file: str, num_bytes: int) -> None:
    """Raise DamagedShard where the shard is missing or has another size."""
    path = directory / file
    if not path.exists():
        raise DamagedShard(str(path), None, f"The shard is gone; {_AGAIN}")
    found = path.stat().st_size
    if found != num_bytes:
        raise DamagedShard(str(path), f"{found} bytes", f"The shard had {num_bytes} bytes; {_AGAIN}")


def check_content(
    directory: Path, file: str, checksum: int | None, sha256: str | None, found_sha256: str | None = None
) -> None:
    """Raise DamagedShard where the shard was altered.

    Args:
        checksum: the shard's checksum that was recorded; None for a shard of an earlier version.
        sha256: of such a shard.
        found_sha256: the file's sha256, if it is known; otherwise the file is read.
    """
    path = directory / file
    if checksum is None:
        found: object = found_sha256 or file_sha256(path)
        expected: object = sha256
        name = "sha256"
    else:
        found, expected, name = _found_checksum(path), checksum, "checksum"
    if found != expected:
        what = f"The shard's {name} was {expected}"
        raise DamagedShard(str(path), found, f"{what}; delete it and {_AGAIN}")


def _found_checksum(path: Path) -> int | str:
    try:
        return open_shard(path).checksums()[1]
    except OSError as error:
        return str(error)


def open_shard(path: Path) -> ShardFile:
    """Open a shard; raise DamagedShard where the file is missing or its header is damaged."""
    try:
        return ShardFile(path)
    except FileNotFoundError:
        raise DamagedShard(str(path), None, f"The shard is gone; {_AGAIN}") from None
    except UserError as error:
        raise DamagedShard(str(path), "damaged", f"{error.remedy} Delete it and {_AGAIN}") from None


def check_sidecar(directory: Path, record: ShardRecord) -> None:
    """Raise DamagedShard where the sidecar names other samples than the shard itself."""
    path = directory / record.file
    shard = open_shard(path)
    ids, rows = shard.read_column(SAMPLE_IDS).numpy(), shard.read_column(ROWS).numpy()
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
