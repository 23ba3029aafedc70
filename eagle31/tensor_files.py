"""Files of tensors: reading those that a user may have, naming a damaged one, and writing them."""

import json
import mmap
import os
import pickle
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle31.errors import UserError

_LENGTH_BYTES = 8  # of the header's length, which comes first
DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LFS_POINTER = b"version https://git-lfs"
_AGAIN = "download or write it again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file: dtype by its name there, shape, and its bytes `start` to `stop`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: BinaryIO, path: Path | str) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name, in the order of their bytes; nothing else is read.

    Source: the safetensors format, https://github.com/huggingface/safetensors#format.

    Args:
        file: opened for reading bytes, at its start.
        path: for error messages.

    Raises:
        UserError: the file is a Git LFS pointer, truncated, or not a safetensors file.
    """
    size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(len(_LFS_POINTER))
    _refuse_pointer(prefix, path)
    start = end = _LENGTH_BYTES + int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    try:
        if start > size:
            raise ValueError(f"it says that it has {start:,} bytes where the file has {size:,}")
        file.seek(_LENGTH_BYTES)
        content = json.loads(file.read(start - _LENGTH_BYTES))
        content.pop("__metadata__", None)
        entries = {}
        for name, value in sorted(content.items(), key=lambda one: one[1]["data_offsets"]):
            first, stop = value["data_offsets"]
            end = start + stop
            entries[name] = TensorEntry(value["dtype"], tuple(value["shape"]), start + first, end)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = f"Its header is damaged ({error}), or it is no safetensors file; {_AGAIN}."
        raise UserError("file", path, remedy) from None
    if end != size:
        raise UserError("file", path, f"It has {size:,} bytes where its header says {end:,}; {_AGAIN}.")
    return entries


def load_tensors(path: Path | str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped into memory; of a dtype not in `DTYPES` their bytes.

    The mapping lasts as long as one of the tensors, also without the file's name. Writing to a tensor changes
    no file.

    `safetensors.safe_open` maps a file, too. But each of its tensors leaves two Python integers behind that
    nobody frees, its first and last byte (seen in 0.8.0): a process that reads a thousand files in a minute
    would grow by 15 MB in an hour.

    Raises:
        UserError: the file is damaged; the message names it.
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:
        entries = read_header(file, path)
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    tensors = {name: mapped[entry.start : entry.stop] for name, entry in entries.items()}
    for name, entry in entries.items():
        if entry.dtype in DTYPES:
            tensors[name] = tensors[name].view(DTYPES[entry.dtype]).reshape(entry.shape)
    return tensors


def check_pointer(path: Path) -> None:
    """Raise UserError if the file is a Git LFS pointer."""
    with open(path, "rb") as file:
        _refuse_pointer(file.read(len(_LFS_POINTER)), path)


def _refuse_pointer(prefix: bytes, path: Path | str) -> None:
    if prefix == _LFS_POINTER:
        remedy = "The file is a Git LFS pointer, not the content; run `git lfs pull` where it was cloned."
        raise UserError("file", path, remedy)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions that the umask gives; safetensors gives the owner's only.

    Args:
        tensors: contiguous, on the CPU.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(dict(tensors), partial, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    os.chmod(partial, mode)
    partial.replace(path)


def load_pickled(path: Path) -> Any:
    """Read what `torch.save` wrote, onto the CPU and without running code in it.

    Raises:
        UserError: the file is damaged, or holds other things than tensors; the message names it.
        OSError: it cannot be opened.
    """
    check_pointer(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = _refused_by_pickle(str(error))
        remedy = f"It is damaged, or it holds code, which is not run ({reason}); {_AGAIN} as safetensors."
        raise UserError("file", path, remedy) from None
    # torch raises RuntimeError or OSError for a damaged archive, and many others for what is no archive.
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError("file", path, f"It is damaged ({reason}); {_AGAIN}.") from None


def load_pickled_tensors(path: Path) -> dict[str, Tensor]:
    """Read a state dict that `torch.save` wrote, nested ones by dotted names.

    Raises what `load_pickled` does.
    """
    tensors = dict(_tensors_within(load_pickled(path), path, ()))
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _tensors_within(content: Any, path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(content, Tensor) and names:
        yield ".".join(names), content
    elif isinstance(content, dict) and all(isinstance(name, str) for name in content):
        for name, one in content.items():
            yield from _tensors_within(one, path, (*names, name))
    else:
        raise UserError("file", path, "It holds other things than the weights of a model; give another file.")


def _refused_by_pickle(message: str) -> str:
    """Return which part of a file torch has refused, without its advice to trust the file."""
    line = next((one for one in message.splitlines() if "WeightsUnpickler error" in one), "")
    return (
        line.partition("WeightsUnpickler error:")[2].strip().partition(" was not")[0] or "no archive of torch"
    )
