"""Loading the packed rows of each optimizer step, with read-ahead in the background."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from typing import Protocol, runtime_checkable

import numpy as np

from data.batches.row_order import balanced, pack_epoch
from data.batches.rows import empty_row, pack_row
from data.samples import CapturedSample, HiddenStateSource, StateShape
from data.store import HiddenStateStore
from eagle31.errors import UserError
from eagle31.training.batch import PackedBatch


@dataclass(frozen=True)
class SourceStats:
    """Statistics of a source that produces samples during training."""

    waiting_bytes: int  # of samples that have arrived and were not read yet
    starved_seconds: float  # the time for which requested states had not arrived
    full_seconds: float  # the time for which the memory limit allowed no further request
    num_restarts: int  # of producers


@runtime_checkable
class OrderedSource(HiddenStateSource, Protocol):
    """A source that produces samples in advance, in the order in which they are announced."""

    @property
    def gave_up(self) -> bool: ...
    def expect(self, indices: Sequence[int]) -> None: ...
    def collect_stats(self) -> SourceStats: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class RowPosition:
    """The first row of a step, in the endless sequence of the rows of all epochs."""

    step: int = 0
    epoch: int = 0
    row: int = 0  # index in the epoch


@dataclass(eq=False)
class RowLoader:
    """A loader of this rank's packed rows of any optimizer step, from the one at which it begins.

    The rows of all epochs form one endless sequence, and each step uses the next `rows_per_step` of them.
    They are distributed by `balanced` if costs are given; otherwise rank r has every world_size-th of them.
    The position in the sequence is therefore the only state, and a step has the same rows on any number of
    ranks. Each rank has as many rows of a step: where they cannot be divided equally, some are empty.

    Where ranks share rows, `rank` and `world_size` count their groups, whose ranks take turns in reading one.

    Args:
        row_tokens: the maximum number of tokens in a row.
        rows_per_step: the number of rows over all ranks and micro-batches.
        costs: what each sample costs in training, in any unit; None if it is not known.
        pin_memory: whether rows are in pinned memory, from which a GPU copies while it computes.
        pad_multiple: rows are padded to a multiple of this, but not beyond `row_tokens`.
        steps_ahead: how many steps are read into memory in advance.
        steps_announced: how many steps are announced to an `OrderedSource`, at most one epoch.
        begin: where the first step begins that is loaded.
        reader: this rank's place among the `num_readers` that share rows.
        state_shape: that of empty rows, where a rank may have one.

    Raises:
        UserError: the data has too few rows for one step.
    """

    source: HiddenStateSource
    _: KW_ONLY
    row_tokens: int
    rows_per_step: int
    rank: int = 0
    world_size: int = 1
    seed: int
    costs: Sequence[float] | None = None
    pin_memory: bool = False
    pad_multiple: int = 64
    steps_ahead: int = 3
    steps_announced: int = 64
    begin: RowPosition = RowPosition()
    state_shape: StateShape | None = None
    reader: int = 0
    num_readers: int = 1

    def __post_init__(self) -> None:
        # Rows are read in their order, and announced or looked up again shortly before or after.
        self._epoch = lru_cache(maxsize=2)(
            partial(pack_epoch, np.asarray(self.source.lengths), self.row_tokens, self.seed)
        )
        self.rows_per_epoch = len(self._epoch(self.begin.epoch))
        self.steps_announced = min(self.steps_announced, self.rows_per_epoch // self.rows_per_step)
        # A single thread reads the steps in the order in which they are announced.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="row-loader")
        self._ahead: deque[tuple[int, Future[list[PackedBatch | None]]]] = deque()
        self._announced = 0  # the first step that is not announced yet
        check_enough(self.rows_per_epoch, self.row_tokens, self.rows_per_step)

    def rows(self, step: int) -> list[list[int]]:
        """Return the sample indices of each of this rank's rows of a step, none for an empty row."""
        rows = [self._epoch(epoch)[index] for epoch, index in self._positions(step)]
        rows += [[]] * (-len(rows) % self.world_size)
        if self.costs is None or self.world_size == 1:
            return rows[self.rank :: self.world_size]
        costs = [sum(self.costs[sample] for sample in row) for row in rows]
        return [rows[index] for index in balanced(costs, self.world_size)[self.rank]]

    def reader_of(self, step: int, index: int) -> int:
        """Return which of the ranks that share the rows reads a row of a step."""
        return (step * -(-self.rows_per_step // self.world_size) + index) % self.num_readers

    def position(self, step: int) -> tuple[int, int]:
        """Return epoch and index of a step's first row."""
        assert step >= self.begin.step
        ahead = self.begin.row + (step - self.begin.step) * self.rows_per_step
        epochs, row = divmod(ahead, self.rows_per_epoch)
        return self.begin.epoch + epochs, row

    def _positions(self, step: int) -> list[tuple[int, int]]:
        epoch, row = self.position(step)
        counted = [divmod(row + index, self.rows_per_epoch) for index in range(self.rows_per_step)]
        return [(epoch + epochs, index) for epochs, index in counted]

    def step_samples(self, step: int) -> list[int]:
        """Return the sample indices of a step on all ranks, ascending."""
        rows = (self._epoch(epoch)[index] for epoch, index in self._positions(step))
        return sorted(index for row in rows for index in row)

    def read_ahead(self, step: int) -> None:
        """Start to read this step and the following ones, `steps_ahead` in all, in the background.

        A step other than the next one restarts the reading there, which an `OrderedSource` does not support.
        """
        if self._ahead and self._ahead[0][0] != step:
            self._drop()
        start = self._ahead[-1][0] + 1 if self._ahead else step
        for ahead in range(start, step + self.steps_ahead):
            self._ahead.append((ahead, self._executor.submit(self._load, ahead)))

    def batches(self, step: int) -> list[PackedBatch | None]:
        """Return this rank's micro-batches of a step, one row each, and start to read the next steps.

        None is a row that another rank reads.
        """
        self.read_ahead(step)
        batches = self._ahead.popleft()[1].result()
        self.read_ahead(step + 1)
        return batches

    def collect_stats(self) -> SourceStats | None:
        """Return the statistics since the last call, or None if the samples are in a store."""
        return self.source.collect_stats() if isinstance(self.source, OrderedSource) else None

    @property
    def gave_up(self) -> bool:
        """Whether rows may lack samples, because the run is to stop and their states have not arrived."""
        return isinstance(self.source, OrderedSource) and self.source.gave_up

    def stop(self) -> None:
        """Wait for no more states."""
        if isinstance(self.source, OrderedSource):
            self.source.stop()

    def close(self) -> None:
        """Stop the background thread, even while it waits for states."""
        self.stop()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _drop(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _load(self, step: int) -> list[PackedBatch | None]:
        rows = self._rows_read(step)
        read = iter(self._read(step, [row for row in rows if row is not None]))
        return [None if row is None else next(read) for row in rows]

    def _rows_read(self, step: int) -> list[list[int] | None]:
        """Return the rows of a step, None for those that others read."""
        return [
            row if self.reader_of(step, index) == self.reader else None
            for index, row in enumerate(self.rows(step))
        ]

    def _read(self, step: int, rows: Sequence[Sequence[int]]) -> list[PackedBatch]:
        if isinstance(self.source, HiddenStateStore):
            return self._read_into_rows(self.source, rows)
        if isinstance(self.source, OrderedSource):
            self._announce(self.source, step)
        samples = iter(self.source.get_many([index for row in rows for index in row]))
        return [self._pack([next(samples) for _ in row]) for row in rows]

    def _read_into_rows(self, source: HiddenStateStore, rows: Sequence[Sequence[int]]) -> list[PackedBatch]:
        batches, places = [], []
        for row in rows:
            lengths = [int(source.lengths[index]) for index in row]
            num_tokens = self._padded(sum(lengths))
            batch, of_row = empty_row(lengths, num_tokens, source.state_shape, pin_memory=self.pin_memory)
            batches.append(batch)
            places += of_row
        source.read_into([index for row in rows for index in row], places)
        return batches

    def _pack(self, samples: Sequence[CapturedSample]) -> PackedBatch:
        if not samples:
            assert self.state_shape is not None
            return empty_row([], self._padded(0), self.state_shape, pin_memory=self.pin_memory)[0]
        num_tokens = self._padded(sum(len(sample.input_ids) for sample in samples))
        return pack_row(samples, num_tokens, pin_memory=self.pin_memory)

    def _padded(self, num_tokens: int) -> int:
        return min(max(-(-num_tokens // self.pad_multiple), 1) * self.pad_multiple, self.row_tokens)

    def _announce(self, source: OrderedSource, step: int) -> None:
        """Announce the samples of `step` and the following steps to the source."""
        start = max(step, self._announced)
        self._announced = step + self.steps_announced
        for ahead in range(start, self._announced):
            source.expect([index for row in self._rows_read(ahead) for index in row or ()])


def check_enough(num_rows: int, row_tokens: int, rows_per_step: int) -> None:
    """Raise UserError if the data's rows are fewer than those of a step."""
    if num_rows < rows_per_step:
        remedy = (
            f"The data fills only {num_rows} rows of {row_tokens} tokens. Lower train.row_tokens, lower this "
            "with the number of processes, or add data."
        )
        raise UserError("train.rows_per_step", rows_per_step, remedy)


def check_divisible(rows_per_step: int, world_size: int, row_ranks: int = 1) -> None:
    """Raise UserError if the rows of a step cannot be divided equally among the ranks, or groups that share.

    Some would then have empty rows, which cost time; a training that is resumed on other ranks may have them.
    """
    check_groups(world_size, row_ranks)
    groups = world_size // row_ranks
    if rows_per_step % groups:
        nearest = -(-rows_per_step // groups) * groups
        of = "" if row_ranks == 1 else f" by train.row_ranks ({row_ranks})"
        remedy = f"It must be a multiple of the number of processes{of}, {groups}, such as {nearest}."
        raise UserError("train.rows_per_step", rows_per_step, remedy)


def check_groups(world_size: int, row_ranks: int) -> None:
    """Raise UserError if the ranks cannot be divided into groups that share rows."""
    if world_size % row_ranks:
        remedy = f"It must divide the number of processes, {world_size}."
        raise UserError("train.row_ranks", row_ranks, remedy)
