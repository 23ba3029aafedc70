"""A writer of a store: it takes samples as they come and writes shards in the background."""

import errno
import re
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from data.samples import CapturedSample
from data.store.codec import encode
from data.store.shards import SHARD_NAME, FinishedShards, shard_paths, write_shard
from eagle31.errors import UserError

QUEUE_BYTES = 1 << 28
_WRITER_NAME = re.compile(r"[A-Za-z0-9_-]+")
_UNFINISHED = ".shard-{writer}-?????.safetensors.partial"


class _Waiting(NamedTuple):
    encoded: Future[None]
    num_bytes: int
    num_tokens: int


class StoreWriter:
    """Appends samples to a store. Other processes may append to it under other names.

    A thread encodes and writes. Memory holds the open shard, encoded, and the samples that wait to be
    encoded: at most `queue_bytes` and at most another shard, or one sample. If the process dies, only these
    are lost.

    Args:
        directory: the store's directory, which is created where it does not exist.
        name: letters, digits, - and _; of no other process.
        shard_tokens: a shard is closed once it holds this many tokens.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        codec: str,
        shard_tokens: int,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        assert _WRITER_NAME.fullmatch(name), name
        self.directory, self.name, self.codec = Path(directory), name, codec
        self.shard_tokens, self.queue_bytes = shard_tokens, queue_bytes
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
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, f"store-writer-{name}")

    def append(self, sample_id: int, sample: CapturedSample) -> None:
        """Append a sample. Its tensors, on any device, must not change afterwards.

        This blocks while too many samples wait.

        Raises:
            UserError: the disk is full, or another process has the name. Finished shards are kept.
            Exception: whatever else failed while an earlier sample was written.
        """
        num_bytes = sample.aux_hidden_states.nbytes + sample.final_hidden_states.nbytes
        num_tokens = len(sample.input_ids)
        while self._waiting and (self._waiting[0].encoded.done() or self._is_full(num_bytes, num_tokens)):
            self._await_first()
        encoded = self._thread.submit(self._take, sample_id, sample)
        self._waiting.append(_Waiting(encoded, num_bytes, num_tokens))

    def flush(self) -> None:
        """Close the open shard and return when everything appended is on disk. Raise what `append` does."""
        while self._waiting:
            self._await_first()
        if self._open:
            self._write()

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

    def _await_first(self) -> None:
        self._waiting[0].encoded.result()  # one that failed stays the first
        self._waiting.popleft()

    def _is_full(self, num_bytes: int, num_tokens: int) -> bool:
        num_bytes += sum(one.num_bytes for one in self._waiting)
        num_tokens += sum(one.num_tokens for one in self._waiting)
        return num_bytes > self.queue_bytes or num_tokens > self.shard_tokens

    def _take(self, sample_id: int, sample: CapturedSample) -> None:
        tensors = encode(sample, self.codec)
        self._open.append((sample_id, {name: tensor.cpu() for name, tensor in tensors.items()}))
        self._open_tokens += len(sample.input_ids)
        if self._open_tokens >= self.shard_tokens:
            self._write()

    def _write(self) -> None:
        path = self.directory / f"shard-{self.name}-{self._next_number:05d}.safetensors"
        if path.exists():
            remedy = f"Another process writes to it as {self.name}; end it and run again."
            raise UserError("capture", self.directory, remedy)
        try:
            write_shard(path, self._open)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise disk_full(self.directory, "The disk is full; finished shards are kept") from error
        self._next_number += 1
        self._open, self._open_tokens = [], 0


def disk_full(directory: Path, what: str) -> UserError:
    remedy = f"{what}; choose another disk, lower data.max_samples, or set capture.mode=online."
    return UserError("output_dir", directory, remedy)


def remove_leftovers(shards: FinishedShards) -> None:
    """Remove the unfinished and the damaged shards of a store that lacks no sample."""
    complete = {shards.directory / record.file for record in shards.records()}
    unfinished = shards.directory.glob(_UNFINISHED.format(writer="*"))
    for path in {*unfinished, *shard_paths(shards.directory)} - complete:
        path.unlink()
