"""A transport through a directory in memory or on a shared disk, with one file per sample."""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.capture.transport.protocol import StateRequest
from data.samples import CapturedSample
from data.store.codec import decode, encode, encoded_bytes, kept_rows
from data.store.shards import sample_checksum, write_columns
from eagle31.errors import UserError
from eagle31.tensor_files import map_tensors

MEMORY = Path("/dev/shm")
# The size of a file beyond the encoded sample: its header, and the partial last page.
_FILE_BYTES = 8192
_SUFFIX, _UNFINISHED = ".safetensors", ".tmp"
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.02
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Spool:
    """One side of a spool. The processes of the producers and of the trainer open the same directory.

    In memory a rename shows all of a file or nothing. A shared disk may show a name before its bytes, and
    lose them in a crash. So files on a disk have a checksum, and one that does not match counts as missing.

    The names of samples are plain strings. A `Path` interns its parts: for names that never come again, the
    table of interned strings grows, and Python 3.12 keeps every one of them until the process ends.
    """

    def __init__(self, directory: Path, codec: str) -> None:
        self.directory = Path(directory)
        self.codec = codec
        self._checked = not self.directory.resolve().is_relative_to(MEMORY)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` needs to open the spool in another process."""
        return {"spool": str(self.directory), "codec": self.codec}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Spool":
        return Spool(Path(content["spool"]), content["codec"])

    def put(self, request: StateRequest, aux: Tensor, final: Tensor) -> None:
        """Write a sample's file. aux [T, A, Ht], final [T, Ht], on any device.

        Raises:
            UserError: the disk is full.
            FileNotFoundError: the directory no longer exists.
        """
        sample = CapturedSample(request.input_ids, request.loss_mask, aux, final)
        tensors = {name: value.cpu() for name, value in encode(sample, self.codec).items()}
        metadata = {"crc32": str(sample_checksum(tensors))} if self._checked else None
        # The file of a producer that died while it wrote the same sample would count towards the bound.
        self._remove_unfinished(request.key)
        temporary = f"{self.directory}/{request.key}.{os.getpid()}{_UNFINISHED}"
        try:
            with open(temporary, "wb") as file:
                write_columns(file, {name: [tensor] for name, tensor in tensors.items()}, metadata)
            os.replace(temporary, self._path(request.key))
        except FileNotFoundError as error:
            if not self.directory.is_dir():
                reason = f"{self.directory}: the run that made this directory has ended"
                raise FileNotFoundError(reason) from error
            # Otherwise it was discarded, or begun by another producer, while it was written.
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            remedy = "The disk is full: free some space, or lower capture.spool_gb."
            raise UserError("capture.spool_dir", self.directory, remedy) from error
        finally:
            _remove(temporary)

    def take(self, request: StateRequest, timeout: float) -> CapturedSample | None:
        """Remove and return a sample; None where it did not come within `timeout` seconds."""
        path, pause = self._path(request.key), _FIRST_PAUSE_SECONDS
        deadline = time.monotonic() + timeout
        while (sample := self._read(path)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        _remove(path)
        if not sample.input_ids.equal(request.input_ids):
            remedy = "It has other tokens than were requested: something else writes there. Run again."
            raise UserError("capture.spool_dir", path, remedy)
        return sample

    def arrived(self, key: str) -> bool:
        """Return whether a sample waits under the key."""
        return os.path.exists(self._path(key))

    def discard(self, key: str) -> None:
        """Remove the key's sample, and any that is being written."""
        _remove(self._path(key))
        self._remove_unfinished(key)

    def close(self) -> None:
        """Nothing is open between two samples."""

    def _read(self, path: str) -> CapturedSample | None:
        """Return the sample, or None where no complete file exists.

        Its mapped states outlive the file's name.
        """
        try:
            tensors, metadata = map_tensors(path)
        except FileNotFoundError:
            return None
        except UserError:
            if not self._checked:
                raise
            return None
        if self._checked and metadata.get("crc32") != str(sample_checksum(tensors)):
            return None
        return decode(tensors)

    def _path(self, key: str) -> str:
        return f"{self.directory}/{key}{_SUFFIX}"

    def _remove_unfinished(self, key: str) -> None:
        with suppress(FileNotFoundError):  # of a trainer that has ended
            for name in os.listdir(self.directory):
                if name.startswith(f"{key}.") and name.endswith(_UNFINISHED):
                    _remove(f"{self.directory}/{name}")


def file_bytes(
    codec: str, loss_mask: Tensor, num_aux_layers: int, hidden_size: int, dtype: torch.dtype
) -> int:
    """Return the largest size of a sample's file. loss_mask bool [T]; `dtype` is the target's."""
    rows = kept_rows(loss_mask)
    return encoded_bytes(codec, rows, num_aux_layers, hidden_size, dtype) + _FILE_BYTES


@contextmanager
def open_spool(base: Path | None, name: str, codec: str, limit_bytes: int) -> Iterator[Spool]:
    """Open a private directory in `base`, which is removed at the end.

    The directory that a killed run of the same name left is removed first.

    Args:
        base: an existing directory; None for memory.
        name: letters, digits, - and _; unique to a trainer process, and the same when its run starts again.
        limit_bytes: the most that will wait in the directory.

    Raises:
        UserError: `base` is no directory, or has less space than that.
    """
    base = base or MEMORY
    if not base.is_dir():
        raise UserError(
            "capture.spool_dir", base, "There is no such directory on this machine; choose another."
        )
    for leftover in base.glob(f"eagle31-{name}.*"):
        if not leftover.is_symlink() and leftover.stat().st_uid == os.getuid():
            shutil.rmtree(leftover)
    free = shutil.disk_usage(base).free
    if free < limit_bytes:
        remedy = f"{base} has {free / 1e9:.2f} GB free; lower it, or choose another capture.spool_dir."
        raise UserError("capture.spool_gb", f"{limit_bytes / 1e9:.2f}", remedy)
    directory = Path(tempfile.mkdtemp(prefix=f"eagle31-{name}.", dir=base))
    try:
        yield Spool(directory, codec)
    finally:
        # A producer that is still alive may add a file in the meantime.
        shutil.rmtree(directory, ignore_errors=True)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
