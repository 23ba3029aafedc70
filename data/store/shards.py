"""The shards of a store: samples concatenated column by column in safetensors, with their checksums.

Checksums are crc32 from Python's zlib. It computes 3.4 GB/s on one core here, where sha256 computes 1.8; the
faster xxhash, google-crc32c and blake3 would have to be installed into every vLLM that writes shards.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.store.codec import ROWS_OF, STATES
from eagle31.errors import UserError
from eagle31.tensor_files import DTYPES, TensorEntry, read_header

if TYPE_CHECKING:  # vLLM's processes import this module, and have no need for fsspec
    from data.store.remote import RemoteFile

SHARD_NAME = re.compile(r"shard-(?P<writer>[A-Za-z0-9_-]+)-(?P<number>\d{5,})\.safetensors")
# What a shard has of each sample besides its tensors: its id, its number of rows of each kind, its crc32.
_SAMPLE_IDS, _ROWS, _CHECKSUMS = "sample_ids", "rows", "checksums"
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PART_BYTES = 4 << 20  # copied at a time of a tensor that is not contiguous; it stays in the cache
_READERS = 16  # threads
_AGAIN = "run again with the capture stage: only this shard is captured again."


class DamagedShard(UserError):
    """A part of a finished store is missing or altered; it can be captured again on its own."""


@dataclass(frozen=True, eq=False)
class ShardRecord:
    """What a shard says about itself."""

    file: str
    num_bytes: int
    ids: NDArray[np.int64]  # [num_samples]
    rows: NDArray[np.int64]  # [num_samples, 3]: tokens, aux states, final-layer states
    checksums: NDArray[np.int64]  # [num_samples]
    checksum: int  # of all bytes but those of the samples, which `checksums` are of

    @property
    def sample_ids(self) -> tuple[int, ...]:
        return tuple(self.ids.tolist())


def write_shard(path: Path, samples: Sequence[tuple[int, Mapping[str, Tensor]]]) -> None:
    """Write a shard, which appears once it is on disk.

    Args:
        path: a path whose name matches `SHARD_NAME`.
        samples: ids, and the tensors of `encode` for each, on the CPU.

    Raises:
        OSError: the disk is full, for example; no file is left then.
    """
    columns = {name: [tensors[name] for _, tensors in samples] for name in samples[0][1]}
    rows = [[len(tensors[name]) for name in ("input_ids", *STATES)] for _, tensors in samples]
    columns[_SAMPLE_IDS] = [torch.tensor([sample_id for sample_id, _ in samples])]
    columns[_ROWS] = [torch.tensor(rows, dtype=torch.int32)]
    columns[_CHECKSUMS] = [torch.tensor([sample_checksum(tensors) for _, tensors in samples])]
    described = {}
    for name, pieces in columns.items():
        alike = {(piece.dtype, piece.shape[1:]) for piece in pieces}
        assert len(alike) == 1, f"{name}: {alike}"
        described[name] = (pieces[0].dtype, [sum(map(len, pieces)), *pieces[0].shape[1:]])
    header, starts = file_header(described)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            # This copies no contiguous tensor and lets other threads run, neither of which safetensors does.
            file.write(header)
            for part in chain.from_iterable(bytes_of(piece) for name in starts for piece in columns[name]):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sample_checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return the crc32 of an encoded sample on the CPU: its columns' bytes, in the order of the file."""
    checksum = 0
    for name in sorted(tensors, key=lambda name: _file_order(name, tensors[name].dtype)):
        for part in bytes_of(tensors[name]):
            checksum = zlib.crc32(part, checksum)
    return checksum


def file_header(columns: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and where each column starts in the file, in that order.

    Source: the safetensors format, https://github.com/huggingface/safetensors#format.

    Args:
        columns: the dtype and the shape of each.
    """
    described: dict[str, Any] = {}
    starts, stop = {}, 0
    for name in sorted(columns, key=lambda name: _file_order(name, columns[name][0])):
        dtype, shape = columns[name]
        starts[name], stop = stop, stop + math.prod(shape) * dtype.itemsize
        offsets = [starts[name], stop]
        described[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _file_order(name: str, dtype: torch.dtype) -> tuple[int, str]:
    # Wide types first, as safetensors does, so that all are aligned.
    return -dtype.itemsize, name


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor on the CPU. Of one that is not contiguous, a part at a time is copied."""
    num_rows = len(tensor) if tensor.is_contiguous() else _PART_BYTES // max(1, tensor[:1].nbytes)
    for part in tensor.detach().split(max(1, num_rows)):
        yield part.contiguous().reshape(-1).view(torch.uint8).numpy().data


def new_memory(num_bytes: int) -> Tensor:
    """Return memory of this size, uint8 [num_bytes]."""
    return torch.empty(num_bytes, dtype=torch.uint8)


class LocalFile:
    """A file that any number of threads can read at any position. It is closed with its last reference.

    It is read, not mapped: a process may have 65,530 mappings, and the kernel ends a process that touches a
    mapping of which the file was cut or cannot be delivered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def header(self) -> dict[str, TensorEntry]:
        """Return what `read_header` does."""
        with open(self.path, "rb") as file:
            return read_header(file, self.path)

    def fill(self, pieces: Sequence[tuple[memoryview, int]]) -> None:
        """Fill memory with the bytes from a position on; raise OSError where the file ends before them."""
        for view, position in pieces:
            done = 0
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], position + done)
                if not count:
                    raise OSError(f"{self.path} ends at byte {position + done}")
                done += count


class _Column(NamedTuple):
    dtype: torch.dtype
    num_rows: int
    row_shape: tuple[int, ...]
    row_bytes: int
    start: int  # in the file


class ShardFile:
    """An open shard, from which any number of threads can read. It is closed with its last reference.

    Raises:
        DamagedShard: the file is missing, truncated, or no shard.
    """

    def __init__(self, source: "Path | RemoteFile") -> None:
        path = source if isinstance(source, Path) else source.path
        try:
            self._file = LocalFile(source) if isinstance(source, Path) else source
            entries = self._file.header()
            self._columns = {
                name: _Column(
                    DTYPES[entry.dtype],
                    entry.shape[0],
                    entry.shape[1:],
                    (entry.stop - entry.start) // max(entry.shape[0], 1),
                    entry.start,
                )
                for name, entry in entries.items()
            }
        except FileNotFoundError:
            raise DamagedShard(str(path), None, f"The shard is gone; {_AGAIN}") from None
        except (UserError, KeyError) as error:
            raise DamagedShard(str(path), "damaged", f"{error} Delete it and {_AGAIN}") from None
        self.num_bytes = max(entry.stop for entry in entries.values())
        self._head_bytes = min(entry.start for entry in entries.values())
        self._names = [name for name in entries if name in ROWS_OF]

    def read(
        self, starts: Sequence[int], rows: Sequence[int], *, allocate: Callable[[int], Tensor] = new_memory
    ) -> tuple[dict[str, Tensor], int]:
        """Return an encoded sample, whose tensors share one block of memory, and its checksum.

        Args:
            starts, rows: the first row and the number of rows of each kind, as in `Rows`.
            allocate: returns uint8 memory for the tensors, of this size or larger.

        Raises:
            OSError: the file ends before these rows, or cannot be read.
        """
        sizes = {name: rows[ROWS_OF[name]] * self._columns[name].row_bytes for name in self._names}
        num_bytes = sum(sizes.values())
        block = allocate(num_bytes)[:num_bytes]
        view, tensors, offset = block.numpy().data, {}, 0
        pieces = []
        for name, size in sizes.items():
            column = self._columns[name]
            position = column.start + starts[ROWS_OF[name]] * column.row_bytes
            pieces.append((view[offset : offset + size], position))
            shape = (rows[ROWS_OF[name]], *column.row_shape)
            tensors[name] = block[offset : offset + size].view(column.dtype).reshape(shape)
            offset += size
        self._file.fill(pieces)
        return tensors, zlib.crc32(view)

    def record(self) -> ShardRecord:
        """Read what the shard says about itself."""
        head = new_memory(self._head_bytes)
        self._file.fill([(head.numpy().data, 0)])
        ids, rows, checksums = columns = [self._column(name) for name in (_SAMPLE_IDS, _ROWS, _CHECKSUMS)]
        checksum = 0
        for part in chain.from_iterable(map(bytes_of, (head, *columns))):
            checksum = zlib.crc32(part, checksum)
        return ShardRecord(
            Path(self._file.path).name,
            self.num_bytes,
            ids.numpy(),
            rows.numpy().astype(np.int64),
            checksums.numpy(),
            checksum,
        )

    def altered_samples(self) -> Iterator[int]:
        """Read everything, and yield the ids of the samples that do not have their checksum."""
        record = self.record()
        starts = record.rows.cumsum(axis=0) - record.rows
        for index, sample_id in enumerate(record.sample_ids):
            found = self.read(starts[index].tolist(), record.rows[index].tolist())[1]
            if found != record.checksums[index]:
                yield sample_id

    def _column(self, name: str) -> Tensor:
        column = self._columns[name]
        block = new_memory(column.num_rows * column.row_bytes)
        self._file.fill([(block.numpy().data, column.start)])
        return block.view(column.dtype).reshape(column.num_rows, *column.row_shape)


def shard_paths(directory: Path) -> list[Path]:
    """Return the shards of a directory by name, damaged ones too."""
    return sorted(path for path in directory.glob("shard-*") if SHARD_NAME.fullmatch(path.name))


class FinishedShards:
    """The shards of a directory, to which any number of processes may be writing."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._records: dict[str, ShardRecord] = {}  # by name

    def records(self) -> list[ShardRecord]:
        """Return, by name, the shards that are complete: on a network, a name may come before its content.

        One that an earlier call has read is not read again, as no writer gives a name twice.
        """
        paths = shard_paths(self.directory)
        new = [path for path in paths if path.name not in self._records]
        with ThreadPoolExecutor(_READERS) as pool:  # a store may have 100,000 on a network
            found = {record.file: record for record in pool.map(_record, new) if record is not None}
        known = self._records | found
        self._records = {path.name: known[path.name] for path in paths if path.name in known}
        return list(self._records.values())


def _record(path: Path) -> ShardRecord | None:
    try:
        return ShardFile(path).record()
    except (OSError, DamagedShard):
        return None


def check_shard(path: Path, num_bytes: int) -> None:
    """Raise DamagedShard where the shard is missing or has another size."""
    if not path.exists():
        raise DamagedShard(str(path), None, f"The shard is gone; {_AGAIN}")
    found = path.stat().st_size
    if found != num_bytes:
        raise DamagedShard(
            str(path), f"{found} bytes", f"The shard had {num_bytes} bytes; delete it and {_AGAIN}"
        )
