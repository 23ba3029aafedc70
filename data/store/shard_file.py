"""The file of a shard: samples concatenated column by column in safetensors, with a checksum for each sample.

Checksums are crc32 from Python's zlib. It computes 3.4 GB/s on one core here, where sha256 computes 1.8; the
faster xxhash, google-crc32c and blake3 would have to be installed into every vLLM that writes shards.
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.store.codec import ROWS_OF, STATES, Rows
from eagle31.errors import UserError
from eagle31.tensor_files import TensorEntry, read_header

SAMPLE_IDS, ROWS = "sample_ids", "rows"
# The kinds of rows, in the order of the column `rows`.
KINDS = ("tokens", "aux", "final")
MAX_HEADER_BYTES = 1 << 20  # of a store's files, which have a dozen columns
_READ_BYTES = 1 << 22
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
_DTYPES_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


def sample_rows(tensors: Mapping[str, Tensor]) -> Rows:
    """Return the numbers of rows of an encoded sample."""
    return Rows(*(len(tensors[name]) for name in ("input_ids", *STATES)))


def sample_checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return the crc32 of an encoded sample on the CPU: its columns' bytes, in the order of the file."""
    checksum = 0
    for name in _in_file_order({name: tensor.element_size() for name, tensor in tensors.items()}):
        checksum = zlib.crc32(tensor_bytes(tensors[name]), checksum)
    return checksum


def shard_columns(samples: Sequence[tuple[int, Mapping[str, Tensor]]]) -> dict[str, list[Tensor]]:
    """Return the pieces of a shard's columns.

    The shard also says which samples it holds, so that its sidecar can be compared with it.

    Args:
        samples: ids, and the tensors of `encode` for each.
    """
    columns = {name: [tensors[name] for _, tensors in samples] for name in samples[0][1]}
    rows = [sample_rows(tensors) for _, tensors in samples]
    columns[SAMPLE_IDS] = [torch.tensor([sample_id for sample_id, _ in samples])]
    columns[ROWS] = [torch.tensor([[r.tokens, r.aux, r.final] for r in rows], dtype=torch.int32)]
    return columns


def write_tensors(path: Path, columns: Mapping[str, Sequence[Tensor]]) -> int:
    """Write a safetensors file of tensors that are given in pieces, concatenated along the first dimension.

    A single pass copies nothing and lets other threads run, neither of which safetensors' own writer does.
    The file appears once it is on disk.

    Returns:
        The size in bytes.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            write_columns(file, columns)
            file.flush()
            os.fsync(file.fileno())
            num_bytes = file.tell()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(path.parent)
    return num_bytes


def file_order(columns: Mapping[str, Sequence[Tensor]]) -> list[str]:
    """Return the columns' names in the order of the file."""
    return _in_file_order({name: pieces[0].element_size() for name, pieces in columns.items()})


def write_columns(
    file: BinaryIO, columns: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the header and then the tensors, which are on the CPU."""
    file.write(header(columns, metadata))
    for name in file_order(columns):
        for piece in columns[name]:
            file.write(tensor_bytes(piece))


def header(columns: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the file's header.

    Source: the safetensors format, https://github.com/huggingface/safetensors#format.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in file_order(columns):
        first = columns[name][0]
        stop = start + sum(piece.nbytes for piece in columns[name])
        shape = [sum(len(piece) for piece in columns[name]), *first.shape[1:]]
        alike = {(piece.dtype, piece.shape[1:]) for piece in columns[name]}
        assert len(alike) == 1, f"{name}: {alike}"
        described[name] = {"dtype": _DTYPES[first.dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shard_checksum(
    head: bytes, sample_ids: bytes | memoryview, rows: bytes | memoryview, checksums: Sequence[int]
) -> int:
    """Return a shard's checksum, which covers every byte: its header, `sample_ids`, `rows`, and the samples.

    Args:
        head: the bytes before the first column.
        checksums: of the samples.
    """
    of_samples = np.asarray(checksums, dtype="<u4").tobytes()
    checksum = 0
    for block in (head, sample_ids, rows, of_samples):
        checksum = zlib.crc32(block, checksum)
    return checksum


def file_checksum(path: Path) -> int:
    """Return the crc32 of a whole file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def new_memory(num_bytes: int) -> Tensor:
    """Return memory of this size, uint8 [num_bytes]."""
    return torch.empty(num_bytes, dtype=torch.uint8)


class PositionedFile(Protocol):
    """A file that any number of threads can read at any position. path: for messages."""

    @property
    def path(self) -> Path | str: ...

    def header(self) -> dict[str, TensorEntry]:
        """Return what `read_header` does."""
        ...

    def fill(self, pieces: Sequence[tuple[memoryview, int]]) -> None:
        """Fill memory with the bytes from a position on; raise OSError where the file ends before them."""
        ...


class LocalFile:
    """A file of this machine, which is closed with its last reference.

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
        with open(self.path, "rb") as file:
            return read_header(file, self.path, MAX_HEADER_BYTES)

    def fill(self, pieces: Sequence[tuple[memoryview, int]]) -> None:
        for view, position in pieces:
            done = 0
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], position + done)
                if not count:
                    raise OSError(f"{self.path} ends at byte {position + done}")
                done += count


class _Column(NamedTuple):
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    row_bytes: int
    start: int  # in the file


class ShardFile:
    """An open shard, from which any number of threads can read. It is closed with its last reference.

    Raises:
        UserError: the file is no shard, or it is truncated.
    """

    def __init__(self, source: Path | PositionedFile) -> None:
        self._file: PositionedFile = LocalFile(source) if isinstance(source, Path) else source
        self.path = self._file.path
        entries = self._file.header()
        strange = [name for name, one in entries.items() if one.dtype not in _DTYPES_BY_NAME or not one.shape]
        if strange or not {*STATES, "input_ids", "loss_mask", SAMPLE_IDS, ROWS} <= entries.keys():
            raise UserError("file", self.path, "It has not the tensors of a shard.")
        self.head_bytes = min((entry.start for entry in entries.values()), default=0)
        self._columns = {
            name: _Column(
                _DTYPES_BY_NAME[entry.dtype],
                entry.shape[1:],
                (entry.stop - entry.start) // max(entry.shape[0], 1),
                entry.start,
            )
            for name, entry in entries.items()
        }
        self._lengths = {name: entry.shape[0] for name, entry in entries.items()}
        self._names = [name for name in entries if name in ROWS_OF]

    def read(
        self,
        starts: Sequence[int],
        rows: Sequence[int],
        *,
        allocate: Callable[[int], Tensor] = new_memory,
    ) -> tuple[dict[str, Tensor], int]:
        """Return an encoded sample, whose tensors share one block of memory, and its checksum.

        Args:
            starts, rows: the first row and the number of rows of each of `KINDS`.
            allocate: returns uint8 memory for the tensors, of this size or larger.

        Raises:
            OSError: the file ends before these rows, or cannot be read.
        """
        first, num = dict(zip(KINDS, starts, strict=True)), dict(zip(KINDS, rows, strict=True))
        for name in self._names:  # before memory is allocated for them
            kind = ROWS_OF[name]
            if first[kind] < 0 or num[kind] < 0 or first[kind] + num[kind] > self._lengths[name]:
                raise OSError(f"{self.path} has {self._lengths[name]} rows of {name}")
        sizes = {name: num[ROWS_OF[name]] * self._columns[name].row_bytes for name in self._names}
        num_bytes = sum(sizes.values())
        block = allocate(num_bytes)[:num_bytes]
        view, tensors, offset = block.numpy().data, {}, 0
        pieces = []
        for name, size in sizes.items():
            column = self._columns[name]
            position = column.start + first[ROWS_OF[name]] * column.row_bytes
            pieces.append((view[offset : offset + size], position))
            shape = (num[ROWS_OF[name]], *column.row_shape)
            tensors[name] = block[offset : offset + size].view(column.dtype).reshape(shape)
            offset += size
        self._file.fill(pieces)
        return tensors, zlib.crc32(view)

    def read_column(self, name: str) -> Tensor:
        """Return a whole column."""
        column, num_rows = self._columns[name], self._lengths[name]
        block = torch.empty(num_rows * column.row_bytes, dtype=torch.uint8)
        self._file.fill([(block.numpy().data, column.start)])
        return block.view(column.dtype).reshape(num_rows, *column.row_shape)

    def checksums(self) -> tuple[list[int], int]:
        """Read everything and return the checksum of each sample and that of the shard.

        Raises:
            OSError: the column `rows` names more rows than the file has, or the file cannot be read.
        """
        head = bytearray(self.head_bytes)
        self._file.fill([(memoryview(head), 0)])
        ids, rows = self.read_column(SAMPLE_IDS), self.read_column(ROWS)
        counts: NDArray = rows.numpy().astype(np.int64)
        starts = counts.cumsum(axis=0) - counts
        found = []
        for start, num in zip(starts.tolist(), counts.tolist(), strict=True):
            found.append(self.read(start, num)[1])
        return found, shard_checksum(bytes(head), tensor_bytes(ids), tensor_bytes(rows), found)


def _in_file_order(itemsizes: Mapping[str, int]) -> list[str]:
    # Wide types first, as safetensors does, so that all are aligned.
    return sorted(itemsizes, key=lambda name: (-itemsizes[name], name))


def _sync_directory(directory: Path) -> None:
    """Make the shard's name durable before its sidecar is written."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
