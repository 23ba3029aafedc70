"""The rows of each optimizer step on the device, copied one row ahead of the one in use."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.batches.loader import RowLoader
from data.batches.shared_rows import SharedRows
from eagle31.training.batch import PackedBatch, sampled, supervised_drafts
from eagle31.training.schedule import RolloutSchedule, RowShare, schedule_rollout


@dataclass(frozen=True)
class RowCounts:
    """What this rank's rows of a step have in all."""

    num_supervised: int  # supervised positions
    num_tokens: int  # without padding
    flops: int = 0  # of forward and backward; 0 where they are not counted


@dataclass(frozen=True)
class DeviceRow:
    """A packed row and its schedule on the device."""

    batch: PackedBatch
    schedule: RolloutSchedule


@dataclass(frozen=True)
class StepRows:
    """This rank's rows of one step. Iterate once: each row is freed when the next one is taken."""

    counts: RowCounts
    num_rows: int
    rows: Iterator[DeviceRow]


@dataclass(frozen=True)
class _Copied:
    row: DeviceRow
    counts: RowCounts
    num_rows: int  # this rank's rows of the step
    read_at: float  # when its data was there, of `time.perf_counter`
    ready: torch.cuda.Event | None


class DeviceRows:
    """This rank's rows of one step after another.

    On a GPU a background thread waits for the loader, schedules a row and copies it on a second stream, while
    the row before it is in use. It starts on a row only when the device has finished with the last but one,
    so that two rows are on the device at most, however far the host is ahead.

    On the CPU a row is scheduled when it is taken, in the caller's thread.

    Args:
        num_steps: speculation steps of the schedule.
        stop_step: the first step that is not needed; no row is read ahead beyond it.
        key_reach: `DrafterConfig.key_reach`, for the schedule.
        chunk_rows: of the schedule; with it the hidden states stay where they are.
        max_drafts: of the schedule.
        shared: hands rows on, where ranks share them.
        flops_of: returns the FLOPs of a row on the CPU; by default they are not counted.
        executor: runs what is done in the background; by default one thread.
    """

    def __init__(
        self,
        loader: RowLoader,
        *,
        num_steps: int,
        device: torch.device,
        dtype: torch.dtype,
        stop_step: int,
        key_reach: int | None = None,
        chunk_rows: int | None = None,
        max_drafts: int | None = None,
        shared: SharedRows | None = None,
        flops_of: Callable[[PackedBatch], int] | None = None,
        executor: Executor | None = None,
    ) -> None:
        self.loader = loader
        self.waited_seconds = 0.0  # for data
        self._stop_step = stop_step
        self._num_steps = num_steps
        self._device, self._dtype, self._flops_of = device, dtype, flops_of
        self._key_reach = key_reach
        self._chunk_rows, self._max_drafts = chunk_rows, max_drafts
        self._shared = shared
        self._batches: list[PackedBatch | None] = []
        self._counts = RowCounts(0, 0)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._executor = executor
        if self._stream is not None and executor is None:
            # A new thread's device is the first one, where it would create a context.
            begin = partial(torch.cuda.set_device, device)
            self._executor = ThreadPoolExecutor(1, "device-rows", initializer=begin)
        self._ahead: tuple[tuple[int, int], Future[_Copied]] | None = None

    def of_step(self, step: int) -> StepRows:
        """Return the rows of a step; waits for the loader."""
        first = self._take(step, 0)
        return StepRows(first.counts, first.num_rows, self._rows(step, first.num_rows, first.row))

    def close(self) -> None:
        """End the background threads, also the loader's."""
        self.loader.stop()
        if self._executor is not None:
            self._executor.shutdown()  # once the row that it reads is there: ranks that share it wait for it
        self.loader.close()

    def _rows(self, step: int, num_rows: int, first: DeviceRow) -> Iterator[DeviceRow]:
        yield first
        del first
        for index in range(1, num_rows):
            yield self._take(step, index).row

    def _take(self, step: int, index: int) -> _Copied:
        """Return a row of a step, and start on the next one."""
        started = time.perf_counter()
        if self._executor is None:
            batch, share = self._read(step, index)
            copied = self._scheduled(step, batch, share)
            self.waited_seconds += copied.read_at - started
            return copied
        used = self._end_of_queued_work()
        if self._ahead is None or self._ahead[0] != (step, index):
            self._ahead = (step, index), self._executor.submit(self._copy, step, index, None)
        copied = self._ahead[1].result()
        self._ahead = None
        following = (step, index + 1) if index + 1 < copied.num_rows else (step + 1, 0)
        if following[0] < self._stop_step:
            self._ahead = following, self._executor.submit(self._copy, *following, used)
        # The thread also waits for the device to finish a row, which is no wait for data.
        self.waited_seconds += max(0.0, copied.read_at - started)
        self._hand_over(copied)
        return copied

    def _read(self, step: int, index: int) -> tuple[PackedBatch, RowShare | None]:
        """Return a row on the CPU, and this rank's share of it. Rows are read in their order."""
        if index == 0 or not self._batches:
            self._batches = self.loader.batches(step)
            self._counts = count_rows(self._batches, self._flops_of)
        batch = self._batches[index]
        if self._shared is not None:
            reader = self.loader.reader_of(step, index)
            return self._shared.exchange(batch, reader, lambda row: self._drafts(step, row)[0])
        assert batch is not None
        return batch, None

    def _scheduled(self, step: int, batch: PackedBatch, share: RowShare | None) -> _Copied:
        read_at = time.perf_counter()
        supervised, weight = self._drafts(step, batch)
        schedule = schedule_rollout(
            supervised,
            batch.document_ids,
            self._device,
            self._key_reach,
            self._chunk_rows,
            weight,
            share,
        )
        row = DeviceRow(batch.to(self._device, self._dtype, states=self._chunk_rows is None), schedule)
        return _Copied(row, self._counts, len(self._batches), read_at, None)

    def _drafts(self, step: int, batch: PackedBatch) -> tuple[Tensor, float]:
        """Return the (row, step) pairs of a row that are rolled out, and what each stands for.

        They are the same on whichever rank the row is.
        """
        supervised = supervised_drafts(batch.loss_mask, batch.document_ids, self._num_steps)
        if self._max_drafts is None:
            return supervised, 1.0
        content = hashlib.sha256(batch.input_ids.numpy().tobytes())
        content.update(f"{self.loader.seed} {step}".encode())
        return sampled(supervised, self._max_drafts, int.from_bytes(content.digest()[:8], "big"))

    def _copy(self, step: int, index: int, used: torch.cuda.Event | None) -> _Copied:
        """Copy a row on the second stream.

        Args:
            used: the end of all that the device does with the last row but one.
        """
        batch, share = self._read(step, index)
        read_at = time.perf_counter()
        if used is not None and not used.query():
            used.synchronize()
        with torch.cuda.stream(self._stream):
            copied = self._scheduled(step, batch, share)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return replace(copied, read_at=read_at, ready=ready)

    def _end_of_queued_work(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _hand_over(self, copied: _Copied) -> None:
        """Have the current stream wait for the copy, and keep the memory until it has used it."""
        current = torch.cuda.current_stream(self._device)
        assert copied.ready is not None
        current.wait_event(copied.ready)
        for tensor in tensors_in(copied.row):
            if tensor.is_cuda:
                tensor.record_stream(current)


def count_rows(
    batches: Sequence[PackedBatch | None], flops_of: Callable[[PackedBatch], int] | None = None
) -> RowCounts:
    """Count what rows on the CPU have. A row that ranks share is counted by the one that reads it."""
    read = [batch for batch in batches if batch is not None]
    supervised = sum(int(supervised_drafts(b.loss_mask, b.document_ids, 1).sum()) for b in read)
    num_tokens = sum(int((b.document_ids >= 0).sum()) for b in read)
    flops = sum(flops_of(batch) for batch in read) if flops_of else 0
    return RowCounts(supervised, num_tokens, flops)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dataclasses and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from tensors_in(getattr(value, one.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)
