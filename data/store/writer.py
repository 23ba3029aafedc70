"""A writer of a store: it takes samples as they come and writes shards in the background."""

import errno
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from data.samples import CapturedSample
from data.store.codec import encode
from data.store.shards import SHARD_NAME, FinishedShards, shard_paths, write_shard
from eagle31.errors import UserError

_WRITER_NAME = re.compile(r"[A-Za-z0-9_-]+")
_UNFINISHED = ".shard-{writer}-?????.safetensors.partial"


class StoreWriter:
    """Appends samples to a store. Other processes may append to it under other names.

    A thread writes a shard while the next one fills, so that memory holds two, encoded. If the process dies,
    only these are lost.

    Args:
        directory: the store's directory, which is created where it does not exist.
        name: letters, digits, - and _; of no other process.
        shard_tokens: a shard is closed once it holds this many tokens.
    """

    def __init__(self, directory: Path, name: str, codec: str, shard_tokens: int) -> None:
        assert _WRITER_NAME.fullmatch(name), name
        self.directory, self.name, self.codec = Path(directory), name, codec
        self.shard_tokens = shard_tokens
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob(_UNFINISHED.format(writer=name)):
            left.unlink()
        # A number is not used again, not even that of a shard that is damaged: whoever has seen that shard
        # would take the new one for it.
        found = filter(None, (SHARD_NAME.fullmatch(path.name) for path in shard_paths(self.directory)))
        numbers = [int(one["number"]) for one in found if one["writer"] == name]
        self._next_number = 1 + max(numbers, default=-1)
        self._open: list[tuple[int, Mapping[str, Tensor]]] = []  # the samples of the open shard, encoded
        self._open_tokens = 0
        self._written: Future[None] | None = None  # the latest of the others
        self._thread = ThreadPoolExecutor(1, f"store-writer-{name}")

    def append(self, sample_id: int, sample: CapturedSample) -> None:
        """Append a sample. Its tensors, on any device, must not change afterwards.

        This blocks where it fills a shard and the one before it is not written yet.

        Raises:
            UserError: the disk is full, or another process has the name. Finished shards are kept.
            Exception: whatever else failed while an earlier shard was written.
        """
        tensors = encode(sample, self.codec)
        self._open.append((sample_id, {name: tensor.cpu() for name, tensor in tensors.items()}))
        self._open_tokens += len(sample.input_ids)
        if self._open_tokens >= self.shard_tokens:
            self._close_shard()

    def flush(self) -> None:
        """Close the open shard and return when everything appended is on disk. Raise what `append` does."""
        if self._open:
            self._close_shard()
        self._await_written()

    def close(self) -> None:
        """Flush and end the thread. Raise what `append` does."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()  # which keeps what was captured before the caller failed

    def _close_shard(self) -> None:
        self._await_written()
        self._written = self._thread.submit(self._write, self._next_number, self._open)
        self._next_number += 1
        self._open, self._open_tokens = [], 0

    def _await_written(self) -> None:
        if self._written is not None:
            self._written.result()  # it fails again and again

    def _write(self, number: int, samples: Sequence[tuple[int, Mapping[str, Tensor]]]) -> None:
        path = self.directory / f"shard-{self.name}-{number:05d}.safetensors"
        if path.exists():
            remedy = f"Another process writes to it as {self.name}; end it and run again."
            raise UserError("capture", self.directory, remedy)
        try:
            write_shard(path, samples)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise disk_full(self.directory, "The disk is full; finished shards are kept") from error


def disk_full(directory: Path, what: str) -> UserError:
    remedy = f"{what}; choose another disk, lower data.max_samples, or set capture.mode=online."
    return UserError("output_dir", directory, remedy)


def remove_leftovers(shards: FinishedShards) -> None:
    """Remove the unfinished and the damaged shards of a store that lacks no sample."""
    complete = {shards.directory / record.file for record in shards.records()}
    unfinished = shards.directory.glob(_UNFINISHED.format(writer="*"))
    for path in {*unfinished, *shard_paths(shards.directory)} - complete:
        path.unlink()
