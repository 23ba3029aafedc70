"""The form of a checkpoint: files of fragments of named float32 tensors, whoever wrote which fragment.

A tensor of a kind, such as the weight or an optimizer state, belongs to a named weight. Each rank writes one
safetensors file with its fragments of the flattened tensors, `KIND/NAME/START`, and a reader finds all
fragments that overlap what it needs. So a checkpoint does not depend on how many ranks wrote it, or on how
DeepSpeed had split the weights. Nothing here needs DeepSpeed, and no file can run code.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle31.errors import UserError
from eagle31.json_files import expecting, file_within, read_json, write_json
from eagle31.tensor_files import read_header, save_tensors

STATE, MANIFEST = "state.json", "manifest.json"
WEIGHTS = "weights"  # a kind; the others are the optimizer's states
_CHECKSUM = "crc32"
_CHUNK_BYTES = 1 << 25


@dataclass(frozen=True)
class SavedFragment:
    """Consecutive elements of a flattened tensor."""

    kind: str
    name: str  # of the weight
    start: int  # in the flattened tensor
    values: Tensor  # float32 [N], on any device

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}/{self.start}"


@dataclass(frozen=True)
class _Stored:
    start: int
    stop: int
    path: Path
    offset: int  # of the first element in the file, in bytes


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is not as it was written."""


def write_part(path: Path, fragments: Sequence[SavedFragment]) -> dict[str, int]:
    """Write fragments, which are on the CPU, into a safetensors file, and have it on disk.

    Returns:
        The file's size and checksum, for the manifest.
    """
    assert all(one.values.dtype == torch.float32 and one.values.dim() == 1 for one in fragments)
    return _write({one.key: one.values.detach() for one in fragments}, path)


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write whole float32 tensors, on the CPU, into a safetensors file.

    Its size and checksum are in a JSON file next to it, for `check_weights`.
    """
    assert all(one.dtype == torch.float32 for one in weights.values())
    entry = _write(weights, path)
    write_checked(path.with_suffix(".json"), {"file": entry})


def _write(tensors: Mapping[str, Tensor], path: Path) -> dict[str, int]:
    save_tensors(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, _CHECKSUM: _file_checksum(path)}


def check_weights(path: Path) -> None:
    """Raise DamagedCheckpoint if a file of `write_weights` is missing or not as it was written."""
    check_file(path, read_checked(path.with_suffix(".json"))["file"])


def write_checked(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON with its own checksum."""
    write_json(path, dict(values) | {_CHECKSUM: _json_checksum(values)})


def read_checked(path: Path) -> dict[str, Any]:
    """Read what `write_checked` wrote.

    Raises:
        DamagedCheckpoint: the file is missing or damaged.
    """
    try:
        values = read_json(path)
        checksum = values.pop(_CHECKSUM)
        for name in values.get("files", {}):
            file_within(path.parent, name, path)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except (UserError, AttributeError, KeyError, TypeError):
        raise DamagedCheckpoint(f"{path} is not as it was written") from None
    if checksum != _json_checksum(values):
        raise DamagedCheckpoint(f"{path} is not as it was written: its checksum differs")
    return values


def check_file(path: Path, expected: Mapping[str, int]) -> None:
    """Compare a file with its size and checksum in the manifest.

    Raises:
        DamagedCheckpoint: it is missing or differs.
    """
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise DamagedCheckpoint(f"{path} has {size:,} bytes, and {expected['bytes']:,} were written")
        checksum = _file_checksum(path)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise DamagedCheckpoint(f"{path} {'is missing' if missing else f'cannot be read: {error}'}") from None
    if checksum != expected[_CHECKSUM]:
        raise DamagedCheckpoint(f"{path} is not as it was written: its checksum differs")


class SavedParts:
    """The tensors in the files of a checkpoint.

    Raises:
        DamagedCheckpoint, UserError: a file is damaged.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        path = checkpoint / MANIFEST
        self.manifest = read_checked(path)
        self._stored: dict[str, dict[str, list[_Stored]]] = {}  # by weight, then kind
        with expecting(path, "the manifest of a checkpoint"):
            self.shapes: dict[str, list[int]] = self.manifest["weights"]
            for file in self.manifest["files"]:
                for stored, kind, name in _fragments_in(checkpoint / file):
                    self._stored.setdefault(name, {}).setdefault(kind, []).append(stored)

    def kinds(self, name: str) -> list[str]:
        """Return the kinds of tensors that a weight has."""
        return sorted(self._stored[name])

    def num_elements(self, kind: str, name: str, shape: Sequence[int]) -> int:
        """Return the number of elements of a tensor of this shape, before memory is allocated for them.

        Raises:
            DamagedCheckpoint: the files have more or fewer.
        """
        number = math.prod(shape)
        found = sum(one.stop - one.start for one in self._stored[name][kind])
        if found != number:
            raise DamagedCheckpoint(f"{kind} of {name}: {found:,} of {number:,} elements are there")
        return number

    def read(self, kind: str, name: str, start: int, values: Tensor) -> None:
        """Read consecutive elements of a flattened tensor.

        Args:
            start: the first element.
            values: float32 [N], on any device, into which they are read.

        Raises:
            DamagedCheckpoint: no file has some of them.
        """
        stop, found = start + len(values), 0
        for stored in self._stored.get(name, {}).get(kind, []):
            first, last = max(start, stored.start), min(stop, stored.stop)
            if first < last:
                target = values[first - start : last - start]
                _read_into(stored.path, stored.offset + 4 * (first - stored.start), target)
                found += last - first
        if found != len(values):
            raise DamagedCheckpoint(f"{kind} of {name}: {found:,} of {len(values):,} elements are there")


def load_weights(checkpoint: Path | str, kind: str = WEIGHTS) -> dict[str, Tensor]:
    """Return the drafter's weights in a checkpoint by name, float32 on the CPU. It needs no DeepSpeed.

    Args:
        kind: the name of an optimizer state, such as "exp_avg", returns that state of the weights that have
            it.

    Raises:
        DamagedCheckpoint: a file is missing or damaged.
    """
    checkpoint = Path(checkpoint)
    with expecting(checkpoint / MANIFEST, "the manifest of a checkpoint"):
        for file, expected in read_checked(checkpoint / MANIFEST)["files"].items():
            check_file(checkpoint / file, expected)
    parts, found = SavedParts(checkpoint), {}
    with expecting(checkpoint / MANIFEST, "the manifest of a checkpoint"):
        for name, shape in parts.shapes.items():
            if kind in parts.kinds(name):
                flat = torch.empty(parts.num_elements(kind, name, shape))
                parts.read(kind, name, 0, flat)
                found[name] = flat.view(shape)
    return found


def _fragments_in(path: Path) -> Iterator[tuple[_Stored, str, str]]:
    with open(path, "rb") as file:
        entries = read_header(file, path)
    for key, entry in entries.items():
        kind, name, start = key.split("/")
        begin = int(start)
        if entry.dtype != "F32" or begin < 0:
            raise ValueError(f"{key} is {entry.dtype}")
        yield _Stored(begin, begin + (entry.stop - entry.start) // 4, path, entry.start), kind, name


def _read_into(path: Path, offset: int, values: Tensor) -> None:
    with open(path, "rb") as file:
        file.seek(offset)
        for chunk in values.split(_CHUNK_BYTES // 4):
            buffer = chunk if chunk.device.type == "cpu" else torch.empty(len(chunk))
            content = _bytes_of(buffer)
            if file.readinto(content) != len(content):
                raise DamagedCheckpoint(f"{path} is truncated")
            if buffer is not chunk:
                chunk.copy_(buffer)


def _bytes_of(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor [N] on the CPU."""
    return memoryview(values.numpy().view(np.uint8))  # type: ignore[arg-type]


def _file_checksum(path: Path) -> int:
    checksum, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb") as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
    return checksum


def _json_checksum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
