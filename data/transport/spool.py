"""From producer to trainer through a directory, in memory or on a disk they share: one file per sample."""

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.samples import CapturedSample
from data.store.codec import Encoding, decode, encode, encoded_bytes, kept_rows
from data.transport.protocol import StateRequest
from eagle31.errors import UserError

MEMORY = Path("/dev/shm")
# What a file takes beyond the encoded sample: its header, and the last page that is not full.
_FILE_BYTES = 8192
_SUFFIX = ".safetensors"
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.02
_DISK_FULL = f"(os error {errno.ENOSPC})"  # safetensors reports the operating system's error as text only


class Spool:
    """One side of a spool; the producers' processes and the trainer's open the same directory.

    In memory a rename shows all of a file or nothing. A shared disk may show a name before its bytes, and
    lose them in a crash: files there carry a checksum, and one that does not fit is not there yet.
    """

    def __init__(self, directory: Path, encoding: Encoding) -> None:
        self.directory = Path(directory)
        self.encoding = encoding
        self._checked = not self.directory.resolve().is_relative_to(MEMORY)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` opens again in another process."""
        return {"spool": str(self.directory), "encoding": self.encoding.to_json()}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Spool":
        return Spool(Path(content["spool"]), Encoding(**content["encoding"]))

    def put(self, request: StateRequest, aux: Tensor, last: Tensor) -> None:
        """aux [T, A, Ht], last [T, Ht], on any device.

        Raises:
            UserError: the disk is full.
            FileNotFoundError: the spool is gone.
        """
        sample = CapturedSample(request.input_ids, request.loss_mask, aux, last)
        tensors = {name: value.cpu().contiguous() for name, value in encode(sample, self.encoding).items()}
        metadata = {"sha256": _sha256(tensors)} if self._checked else None
        # What a producer left that died while it wrote the same sample would count against the bound.
        self._remove_unfinished(request.key)
        temporary = self.directory / f"{request.key}.{os.getpid()}.tmp"
        try:
            save_file(tensors, temporary, metadata)
            temporary.replace(self._path(request.key))
        except (FileNotFoundError, SafetensorError) as error:
            if not self.directory.is_dir():
                raise FileNotFoundError(
                    f"{self.directory}: the trainer that it belonged to has ended"
                ) from error
            if _DISK_FULL in str(error):
                remedy = "The disk is full: free some space, or lower capture.spool_gb."
                raise UserError("capture.spool_dir", self.directory, remedy) from error
            # Else it was discarded, or begun by another producer, while it was written.
            if isinstance(error, SafetensorError):
                raise
        finally:
            temporary.unlink(missing_ok=True)

    def take(self, request: StateRequest, timeout: float) -> CapturedSample | None:
        """Removes and returns what was put; None when nothing came within `timeout` seconds."""
        path, pause = self._path(request.key), _FIRST_PAUSE_SECONDS
        deadline = time.monotonic() + timeout
        while (sample := self._read(path)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        path.unlink(missing_ok=True)
        assert sample.input_ids.equal(request.input_ids), f"{path} holds another sample"
        return sample

    def arrived(self, key: str) -> bool:
        """Whether something waits under the key."""
        return self._path(key).exists()

    def discard(self, key: str) -> None:
        """Removes what was put under the key, and what is being put."""
        self._path(key).unlink(missing_ok=True)
        self._remove_unfinished(key)

    def _read(self, path: Path) -> CapturedSample | None:
        """None if there is no whole one; else its states are mapped, and outlive the file's name."""
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except FileNotFoundError:
            return None
        except SafetensorError:
            if not self._checked:
                raise
            return None
        if self._checked and metadata.get("sha256") != _sha256(tensors):
            return None
        return decode(tensors)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _remove_unfinished(self, key: str) -> None:
        for path in self.directory.glob(f"{key}.*.tmp"):
            path.unlink(missing_ok=True)


def file_bytes(
    encoding: Encoding, loss_mask: Tensor, num_aux_layers: int, hidden_size: int, dtype: torch.dtype
) -> int:
    """The most that a sample takes in a spool. loss_mask bool [T], `dtype` the target's."""
    rows = kept_rows(encoding, loss_mask)
    return encoded_bytes(encoding, rows, num_aux_layers, hidden_size, dtype) + _FILE_BYTES


@contextmanager
def open_spool(base: Path | None, name: str, encoding: Encoding, limit_bytes: int) -> Iterator[Spool]:
    """A private directory below `base`, removed at the end; what a dead run of the same name left goes first.

    Args:
        base: None is memory.
        name: letters, digits, - and _; of one trainer process, the same when its run is started again.
        limit_bytes: what will wait in it at most.

    Raises:
        UserError: `base` is no directory, or has less room than that.
    """
    base = base or MEMORY
    if not base.is_dir():
        raise UserError("capture.spool_dir", base, "Is no directory here; give one.")
    for left in base.glob(f"eagle31-{name}.*"):
        if not left.is_symlink() and left.stat().st_uid == os.getuid():
            shutil.rmtree(left)
    free = shutil.disk_usage(base).free
    if free < limit_bytes:
        remedy = f"{base} has {free / 1e9:.2f} GB free; lower it, or choose another capture.spool_dir."
        raise UserError("capture.spool_gb", f"{limit_bytes / 1e9:.2f}", remedy)
    directory = Path(tempfile.mkdtemp(prefix=f"eagle31-{name}.", dir=base))
    try:
        yield Spool(directory, encoding)
    finally:
        # A producer that is still alive may add a file meanwhile.
        shutil.rmtree(directory, ignore_errors=True)


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
