"""A transport through a directory in memory or on a shared disk, with one file per sample."""

import errno
import os
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from data.capture.transport.protocol import StateRequest
from data.samples import CapturedSample, StateShape
from data.store.codec import ROWS_OF, decode, encode, encoded_bytes, kept_rows, supervised_final
from data.store.shards import bytes_of, file_header, sample_checksum
from eagle31.errors import UserError
from eagle31.tensor_files import load_tensors

MEMORY = Path("/dev/shm")
# Takes the states of the next n tokens: aux [n, A, Ht], and final [n, Ht] before the final norm.
Write = Callable[[Tensor, Tensor], None]
# The size of a file beyond the encoded sample: its header, and the partial last page.
_FILE_BYTES = 8192
_CHECKSUMS = "checksums"  # a column: the crc32 of each other one
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

    @contextmanager
    def writing(self, request: StateRequest) -> Iterator[Write]:
        """Write a sample's file, which others see once the context ends without an error.

        Raises:
            UserError: the disk is full.
            FileNotFoundError: the directory no longer exists.
        """
        # The file of a producer that died while it wrote the same sample would count towards the bound.
        self._remove_unfinished(request.key)
        temporary = f"{self.directory}/{request.key}.{secrets.token_hex(4)}{_UNFINISHED}"
        try:
            with open(temporary, "wb") as file:
                sample = _SampleFile(file, request, self.codec, self._checked)
                yield sample.write
                sample.finish()
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
            remedy = (
                "It has other tokens than were requested: the server changes prompts, or something else "
                "writes there. Run again."
            )
            raise UserError("capture.spool_dir", path, remedy)
        return sample

    def arrived(self, key: str) -> bool:
        """Return whether a sample waits under the key."""
        return os.path.exists(self._path(key))

    def discard(self, key: str) -> None:
        """Remove the key's sample, and any that is being written."""
        _remove(self._path(key))
        self._remove_unfinished(key)

    def _read(self, path: str) -> CapturedSample | None:
        """Return the sample, or None where no complete file exists.

        Its mapped states outlive the file's name.
        """
        try:
            tensors = load_tensors(path)
        except FileNotFoundError:
            return None
        except UserError:
            if not self._checked:
                raise
            return None
        checksums = tensors.pop(_CHECKSUMS).tolist()
        if self._checked and checksums != [sample_checksum({name: one}) for name, one in tensors.items()]:
            return None
        return decode(tensors)

    def _path(self, key: str) -> str:
        return f"{self.directory}/{key}{_SUFFIX}"

    def _remove_unfinished(self, key: str) -> None:
        with suppress(FileNotFoundError):  # of a trainer that has ended
            for name in os.listdir(self.directory):
                if name.startswith(f"{key}.") and name.endswith(_UNFINISHED):
                    _remove(f"{self.directory}/{name}")


class _SampleFile:
    """The file of a sample, whose columns grow with each slice. Their sizes follow from the loss mask."""

    def __init__(self, file: BinaryIO, request: StateRequest, codec: str, checked: bool) -> None:
        self._file, self._request, self._codec, self._checked = file, request, codec, checked
        self._supervised = supervised_final(request.loss_mask)
        self._num_tokens = 0
        self._ends: dict[str, int] = {}  # by column, in the order of the file: where what was written ends
        self._checksums: dict[str, int] = {}

    def write(self, aux: Tensor, final: Tensor) -> None:
        """Add the states of the next tokens."""
        first, end = self._num_tokens, self._num_tokens + len(final)
        ids, mask = self._request.input_ids[first:end], self._request.loss_mask[first:end]
        tensors = encode(CapturedSample(ids, mask, aux, final), self._codec, self._supervised, first)
        if not self._ends:
            rows = kept_rows(self._request.loss_mask)
            columns = {
                name: (one.dtype, [rows[ROWS_OF[name]], *one.shape[1:]]) for name, one in tensors.items()
            }
            header, self._ends = file_header(columns | {_CHECKSUMS: (torch.int64, [len(columns)])})
            self._file.write(header)
        for name, tensor in tensors.items():
            self._append(name, tensor.cpu())
        self._num_tokens = end

    def finish(self) -> None:
        """Add the checksums."""
        assert self._num_tokens == len(self._request.input_ids), "a sample has other states than tokens"
        checksums = [self._checksums.get(name, 0) for name in self._ends if name != _CHECKSUMS]
        self._append(_CHECKSUMS, torch.tensor(checksums))

    def _append(self, name: str, tensor: Tensor) -> None:
        self._file.seek(self._ends[name])
        for part in bytes_of(tensor):
            self._file.write(part)
            if self._checked:
                self._checksums[name] = zlib.crc32(part, self._checksums.get(name, 0))
        self._ends[name] = self._file.tell()


def file_bytes(codec: str, loss_mask: Tensor, shape: StateShape) -> int:
    """Return the largest size of the file of a sample of the target's states. loss_mask bool [T]."""
    return encoded_bytes(codec, kept_rows(loss_mask), shape) + _FILE_BYTES


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
