"""The shards of a store: a file of samples each, and a sidecar with their ids and checksums."""

import hashlib
import json
import os
import re
import time
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
_READ_BYTES = 1 << 22
_SETTLED_SECONDS = 2.0  # longer than the resolution of any file system's times
_ROWS_IN_JSON = ("lengths", "aux_rows", "last_rows")
_AGAIN = "run again with the capture stage: only this shard is captured again."


class DamagedShard(UserError):
    """A shard of a finished store is missing or altered; it can be captured again on its own."""


@dataclass(frozen=True, eq=False)
class ShardRecord:
    """A finished shard's sidecar.

    Shards of earlier versions have the file's sha256 instead of checksums.
    """

    file: str
    num_bytes: int
    encoding: Encoding
    ids: NDArray[np.int64]  # [num_samples]
    rows: NDArray[np.int64]  # [num_samples, 3]: tokens, aux states, final-layer states
    checksum: int | None = None
    checksums: NDArray[np.int64] | None = None  # [num_samples]
    sha256: str | None = None

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
        if self.checksums is None:
            return content | {"sha256": self.sha256}
        return content | {"checksum": self.checksum, "checksums": self.checksums.tolist()}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "ShardRecord":
        ids = np.array(content["sample_ids"], dtype=np.int64)
        rows = np.array([content[name] for name in _ROWS_IN_JSON], dtype=np.int64).T.reshape(len(ids), 3)
        if not SHARD_NAME.fullmatch(content["file"]):
            raise ValueError(f"{content['file']!r} is no shard's name")
        known = content["file"], content["num_bytes"], _encoding(**content["encoding"]), ids, rows
        if "checksums" not in content:
            return ShardRecord(*known, sha256=content["sha256"])
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
        self._changed: tuple[int, float] | None = None  # the directory's time of change, and when it was seen
        self._files: dict[
            str, tuple[int, int]
        ] = {}  # inodes of a shard and its sidecar, by the sidecar's name
        self._records: dict[str, ShardRecord] = {}  # by the sidecar's name
        self._other_size: set[str] = set()  # sidecars whose shard does not have the size that they state

    def records(self) -> list[ShardRecord]:
        """Return, by name, the shards that have a sidecar and had the size that it states.

        What was seen by an earlier call is not looked at again: a call without news takes one look at the
        directory, and one with news a listing.
        """
        if self._has_changed():
            self._list()
        for name in sorted(self._other_size):
            if self._has_size(self._records[name]):
                self._other_size.remove(name)
        return [record for name, record in self._records.items() if name not in self._other_size]

    def _has_changed(self) -> bool:
        changed, now = os.stat(self.directory).st_mtime_ns, time.monotonic()
        if self._changed is None or self._changed[0] != changed:
            self._changed = changed, now
            return True
        # A later change may leave the time as it is if it follows too closely.
        return now - self._changed[1] < _SETTLED_SECONDS

    def _list(self) -> None:
        with os.scandir(self.directory) as entries:
            inodes = {entry.name: entry.inode() for entry in entries if entry.name.startswith("shard-")}
        files = {}
        for name, inode in inodes.items():
            shard = inodes.get(name.removesuffix(".json") + ".safetensors")
            if name.endswith(".json") and shard is not None and self._is_mine(name):
                files[name] = shard, inode
        records = {}
        for name in sorted(files):
            if self._files.get(name) == files[name]:
                records[name] = self._records[name]
                continue
            try:
                records[name] = read_sidecar(self.directory / name)
            except DamagedShard:
                if (self.directory / name).exists():
                    raise
                del files[name]  # removed in the meantime
                continue
            self._other_size.add(name)
        self._files, self._records = files, records
        self._other_size &= records.keys()

    def _is_mine(self, sidecar: str) -> bool:
        return (
            self._writer is None
            or split_name(sidecar.removesuffix(".json") + ".safetensors")[0] == self._writer
        )

    def _has_size(self, record: ShardRecord) -> bool:
        try:
            return (self.directory / record.file).stat().st_size == record.num_bytes
        except FileNotFoundError:
            return False


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


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
