"""The form of a checkpoint: files of fragments of named float32 tensors, whoever wrote which fragment.

A tensor of a kind, such as the weight or an optimizer state, belongs to a named weight. Each rank writes one
safetensors file with its fragments of the flattened tensors, `KIND/NAME/START`, and a reader finds all
fragments that overlap what it needs. So a checkpoint does not depend on how many ranks wrote it, or on how
DeepSpeed had split the weights. Nothing here needs DeepSpeed, and no file can run code.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle31.errors import UserError
from eagle31.json_files import expecting, file_within, read_json, write_json
from eagle31.tensor_files import load_tensors, save_tensors

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
    """The tensors in the files of a checkpoint, which are mapped into memory.

    Raises:
        DamagedCheckpoint, UserError: a file is damaged.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        path = checkpoint / MANIFEST
        self.manifest = read_checked(path)
        self._stored: dict[str, dict[str, list[tuple[int, Tensor]]]] = {}  # by weight, then kind
        with expecting(path, "the manifest of a checkpoint"):
            self.shapes: dict[str, list[int]] = self.manifest["weights"]
            for file in self.manifest["files"]:
                for key, values in load_tensors(checkpoint / file).items():
                    kind, name, start = key.split("/")
                    self._stored.setdefault(name, {}).setdefault(kind, []).append((int(start), values))

    def kinds(self, name: str) -> list[str]:
        """Return the kinds of tensors that a weight has."""
        return sorted(self._stored[name])

    def read(self, kind: str, name: str, start: int, values: Tensor) -> None:
        """Read consecutive elements of a flattened tensor.

        Args:
            start: the first element.
            values: float32 [N], on any device, into which they are read.

        Raises:
            DamagedCheckpoint: no file has some of them.
        """
        stop, found = start + len(values), 0
        for begin, stored in self._stored.get(name, {}).get(kind, []):
            first, last = max(start, begin), min(stop, begin + len(stored))
            if first < last:
                values[first - start : last - start].copy_(stored[first - begin : last - begin])
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
    for file, expected in read_checked(checkpoint / MANIFEST)["files"].items():
        check_file(checkpoint / file, expected)
    parts, found = SavedParts(checkpoint), {}
    for name, shape in parts.shapes.items():
        if kind in parts.kinds(name):
            found[name] = torch.empty(shape)
            parts.read(kind, name, 0, found[name].view(-1))
    return found


def _file_checksum(path: Path) -> int:
    checksum, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb") as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
    return checksum


def _json_checksum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
