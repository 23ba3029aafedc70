"""The shards of a store: a file of samples each, and a sidecar with their ids and checksums."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data.store.codec import Encoding
from data.store.shard_file import (
    ROWS,
    SAMPLE_IDS,
    PositionedFile,
    ShardFile,
    header,
    sample_checksum,
    shard_checksum,
    shard_columns,
    tensor_bytes,
    write_tensors,
)
from eagle31.errors import UserError
from eagle31.json_files import expecting, read_json, write_json, write_text

REFUSED = "refused"
SHARD_NAME = re.compile(r"shard-(?P<writer>[^/\0]+)-(?P<number>\d{5,})\.safetensors")
_ROWS_IN_JSON = ("lengths", "aux_rows", "last_rows")
_AGAIN = "run again with the capture stage: only this shard is captured again."


class DamagedShard(UserError):
    """A shard of a finished store is missing or altered; it can be captured again on its own."""


@dataclass(frozen=True, eq=False)
class ShardRecord:
    """A finished shard's sidecar."""

    file: str
    num_bytes: int
    encoding: Encoding
    ids: NDArray[np.int64]  # [num_samples]
    rows: NDArray[np.int64]  # [num_samples, 3]: tokens, aux states, final-layer states
    checksum: int  # of the whole shard
    checksums: NDArray[np.int64]  # [num_samples]

    @cached_property
    def writer(self) -> str:
        return split_name(self.file)[0]

    @property
    def sample_ids(self) -> tuple[int, ...]:
        return tuple(self.ids.tolist())

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each sample."""
        return tuple(self.rows[:, 0].tolist())

    def to_json(self) -> dict[str, Any]:
        columns = dict(zip(_ROWS_IN_JSON, self.rows.T.tolist(), strict=True))
        whole = {"file": self.file, "num_bytes": self.num_bytes, "encoding": self.encoding.to_json()}
        content = whole | {"sample_ids": self.ids.tolist()} | columns
        return content | {"checksum": self.checksum, "checksums": self.checksums.tolist()}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "ShardRecord":
        ids = np.array(content["sample_ids"], dtype=np.int64)
        rows = np.array([content[name] for name in _ROWS_IN_JSON], dtype=np.int64).T.reshape(len(ids), 3)
        if not SHARD_NAME.fullmatch(content["file"]):
            raise ValueError(f"{content['file']!r} is no shard's name")
        known = content["file"], content["num_bytes"], _encoding(**content["encoding"]), ids, rows
        checksums = np.array(content["checksums"], dtype=np.int64).reshape(len(ids))
        return ShardRecord(*known, checksum=content["checksum"], checksums=checksums)


@lru_cache
def _encoding(**content: str) -> Encoding:
    return Encoding(**content)


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
    columns = shard_columns(samples)
    [ids], [rows] = columns[SAMPLE_IDS], columns[ROWS]
    checksums = [sample_checksum(tensors) for _, tensors in samples]
    num_bytes = write_tensors(path, columns)
    record = ShardRecord(
        path.name,
        num_bytes,
        encoding,
        ids.numpy(),
        rows.numpy().astype(np.int64),
        shard_checksum(header(columns), tensor_bytes(ids), tensor_bytes(rows), checksums),
        np.array(checksums, dtype=np.int64),
    )
    write_text(path.with_suffix(".json"), json.dumps(record.to_json()) + "\n")
    return record


def read_sidecar(path: Path) -> ShardRecord:
    """Read a sidecar; raise DamagedShard where it is missing or damaged."""
    try:
        return ShardRecord.from_json(read_json(path))
    except FileNotFoundError:
        what = "The shard has lost its sidecar"
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError):
        what = "The file is no shard's sidecar of this version"
    shard = path.with_suffix(".safetensors").name
    raise DamagedShard(str(path), None, f"{what}; delete it with {shard} and {_AGAIN}")


class FinishedShards:
    """The finished shards of a directory, to which any number of processes may be writing.

    Args:
        writer: only the shards of this writer; None for all.
    """

    def __init__(self, directory: Path, writer: str | None = None) -> None:
        self.directory, self._writer = Path(directory), writer
        self._records: dict[tuple[str, int], ShardRecord] = {}  # by the sidecar's name and its inode

    def records(self) -> list[ShardRecord]:
        """Return, by name, the shards that have a sidecar and the size that it states.

        A sidecar that an earlier call has read is not read again.
        """
        with os.scandir(self.directory) as entries:
            inodes = {entry.name: entry.inode() for entry in entries if entry.name.startswith("shard-")}
        records = {}
        for name in sorted(name for name in inodes if name.endswith(".json")):
            shard = Path(name).with_suffix(".safetensors").name
            if shard not in inodes or self._writer not in (None, split_name(shard)[0]):
                continue
            found = self._records.get((name, inodes[name]))
            try:
                found = found or read_sidecar(self.directory / name)
                if (self.directory / shard).stat().st_size == found.num_bytes:
                    records[name, inodes[name]] = found
            except (DamagedShard, FileNotFoundError):
                if (self.directory / name).exists() and (self.directory / shard).exists():
                    raise
        self._records = records
        return list(records.values())


def refuse(directory: Path, name: str, sample_id: int, reason: str) -> None:
    """Record that a sample cannot be captured; it counts as done.

    Args:
        name: the writer's name.
    """
    content = {"sample_id": sample_id, "reason": reason, "writer": name}
    write_json(Path(directory) / REFUSED / f"{sample_id}.json", content)


def refused_ids(directory: Path) -> list[int]:
    """Return the ids of refused samples, ascending, from the names of their files."""
    return sorted(int(path.stem) for path in (Path(directory) / REFUSED).glob("[0-9]*.json"))


def refused(directory: Path) -> dict[int, str]:
    """Return the reasons of refused samples, by sample id."""
    found = {}
    for path in (Path(directory) / REFUSED).glob("[0-9]*.json"):
        with expecting(path, "the reason why a sample was refused"):
            content = read_json(path)
            found[int(content["sample_id"])] = str(content["reason"])
    return dict(sorted(found.items()))


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


def check_content(directory: Path, file: str, checksum: int) -> None:
    """Raise DamagedShard where the shard does not have the checksum that was recorded."""
    path = directory / file
    found = _found_checksum(path)
    if found != checksum:
        what = f"The shard's checksum was {checksum}"
        raise DamagedShard(str(path), found, f"{what}; delete it and {_AGAIN}")


def _found_checksum(path: Path) -> int | str:
    try:
        return open_shard(path).checksums()[1]
    except OSError as error:
        return str(error)


def open_shard(source: Path | PositionedFile) -> ShardFile:
    """Open a shard; raise DamagedShard where the file is missing or its header is damaged."""
    path = source if isinstance(source, Path) else source.path
    try:
        return ShardFile(source)
    except FileNotFoundError:
        raise DamagedShard(str(path), None, f"The shard is gone; {_AGAIN}") from None
    except UserError as error:
        raise DamagedShard(str(path), "damaged", f"{error.remedy} Delete it and {_AGAIN}") from None


def check_sidecar(directory: Path, record: ShardRecord) -> None:
    """Raise DamagedShard where the sidecar names other samples than the shard itself."""
    path = directory / record.file
    shard = open_shard(path)
    ids, rows = shard.read_column(SAMPLE_IDS).numpy(), shard.read_column(ROWS).numpy()
    if not (np.array_equal(ids, record.ids) and np.array_equal(rows, record.rows)):
        sidecar = path.with_suffix(".json").name
        raise DamagedShard(str(path), sidecar, f"The two name other samples; delete both and {_AGAIN}")
