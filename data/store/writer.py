"""A writer of a store: it takes samples as they come and writes shards in the background."""

import errno
import os
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from threading import Condition, Thread
from typing import IO, NamedTuple

from torch import Tensor

from data.locks import holder, try_lock
from data.samples import CapturedSample
from data.store.codec import encode
from data.store.shards import FinishedShards, is_complete, write_shard
from eagle31.errors import UserError

QUEUE_BYTES = 1 << 28
_WRITER_NAME = re.compile(r"[A-Za-z0-9_-]+")
# Shards, finished or not.
_SHARD_FILE = re.compile(r"\.?(?P<name>shard-(?P<writer>.+)-(?P<number>\d{5,})\.safetensors)")


class _Waiting(NamedTuple):
    sample_id: int
    sample: CapturedSample
    num_bytes: int


class StoreWriter:
    """Appends samples to a store. Other processes may append to it under other names.

    A thread encodes and writes. Memory holds the open shard, encoded, and the samples that wait to be
    encoded: at most `queue_bytes` and at most another shard, or one sample. If the process dies, only these
    are lost.

    Args:
        directory: the store's directory, which is created where it does not exist.
        name: letters, digits, - and _; one process at a time can have it.
        shard_tokens: a shard is closed once it holds this many tokens.

    Raises:
        UserError: another process writes under this name.
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
        lock = hold_name(self.directory, name)
        if lock is None:
            who = holder(_lock_file(self.directory, name))
            raise UserError(
                "capture", self.directory, f"Another process writes to it as {name}: {who}; end it."
            )
        self._lock = lock
        # A number is not used again, not even that of a shard that is gone: whoever has seen that shard would
        # take the new one for it.
        self._next_number = 1 + max(_numbers(self.directory, name), default=-1)
        remove_leftovers(self.directory, name)
        self._open: list[tuple[int, Mapping[str, Tensor]]] = []  # the samples of the open shard, encoded
        self._open_tokens = 0
        self._changed = Condition()  # guards the fields below
        self._waiting: deque[_Waiting] = deque()
        self._flushing = self._closing = False
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"store-writer-{name}", daemon=True)
        self._thread.start()

    def append(self, sample_id: int, sample: CapturedSample) -> None:
        """Append a sample. Its tensors, on any device, must not change afterwards.

        This blocks while too many samples wait.

        Raises:
            UserError: the disk is full. Finished shards are kept.
            Exception: whatever else failed while this or an earlier sample was written.
        """
        num_bytes = sample.aux_hidden_states.nbytes + sample.final_hidden_states.nbytes
        new = _Waiting(sample_id, sample, num_bytes)
        assert not self._closing
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._has_room(new))
            self._raise_failure()
            self._waiting.append(new)
            self._changed.notify_all()

    def flush(self) -> None:
        """Close the open shard and return when everything appended is on disk. Raise what `append` does."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._flushing or self._failure is not None)
            self._raise_failure()

    def close(self) -> None:
        """Flush, end the thread and release the name. Raise what `append` does."""
        if self._lock.closed:
            return
        try:
            self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
            self._lock.close()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()  # which keeps what was captured before the caller failed

    def _has_room(self, new: _Waiting) -> bool:
        num_bytes = sum(one.num_bytes for one in self._waiting) + new.num_bytes
        num_tokens = sum(len(one.sample.input_ids) for one in [*self._waiting, new])
        fits = num_bytes <= self.queue_bytes and num_tokens <= self.shard_tokens
        return fits or not self._waiting

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            with self._changed:
                self._failure = self._explained(error)
                self._waiting.clear()
                self._open = []
                self._changed.notify_all()

    def _step(self) -> bool:
        """Take one sample, or end a flush where none waits; return false at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._flushing or self._closing)
            waiting = self._waiting[0] if self._waiting else None
        if waiting is not None:
            self._take(waiting)
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()
            return True
        if self._open:
            self._write()
        with self._changed:
            # A sample may have come in the meantime: the flush ends when nothing waits.
            if not self._waiting:
                self._flushing = False
                self._changed.notify_all()
            return bool(self._waiting) or not self._closing

    def _take(self, new: _Waiting) -> None:
        tensors = encode(new.sample, self.codec)
        self._open.append((new.sample_id, {name: tensor.cpu() for name, tensor in tensors.items()}))
        self._open_tokens += len(new.sample.input_ids)
        if self._open_tokens >= self.shard_tokens:
            self._write()

    def _write(self) -> None:
        path = self.directory / f"shard-{self.name}-{self._next_number:05d}.safetensors"
        self._next_number += 1
        write_shard(path, self._open)
        self._open, self._open_tokens = [], 0

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return disk_full(self.directory, "The disk is full; finished shards are kept")
        return error


def disk_full(directory: Path, what: str) -> UserError:
    remedy = f"{what}; choose another disk, lower data.max_samples, or set capture.mode=online."
    return UserError("output_dir", directory, remedy)


def hold_name(directory: Path, name: str) -> IO[str] | None:
    """Reserve a writer's name until the lock is closed or the process ends; return None where it is taken."""
    return try_lock(_lock_file(directory, name))


def _lock_file(directory: Path, name: str) -> Path:
    return directory / f".writer-{name}.lock"


def _numbers(directory: Path, name: str) -> list[int]:
    """Return the numbers of a writer's files, finished or not."""
    found = filter(None, map(_SHARD_FILE.match, os.listdir(directory)))
    return [int(one["number"]) for one in found if one["writer"] == name]


def remove_leftovers(directory: Path, name: str) -> None:
    """Remove a writer's unfinished files. Only the process that holds the name may call this."""
    for file in os.listdir(directory):
        found = _SHARD_FILE.match(file)
        if found and found["writer"] == name and not is_complete(directory / file):
            (directory / file).unlink()


def remove_all_leftovers(shards: FinishedShards) -> None:
    """Remove the unfinished files of every writer that is not running."""
    directory, complete = shards.directory, {record.file for record in shards.records()}
    found = map(_SHARD_FILE.match, set(os.listdir(directory)) - complete)
    for name in sorted({one["writer"] for one in found if one}):
        if (lock := hold_name(directory, name)) is not None:
            with lock:
                remove_leftovers(directory, name)
