"""From samples to the packed rows of each optimizer step, read ahead in the background."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from data.batches.packing import pack_epoch
from data.samples import CapturedSample, HiddenStateSource
from eagle31.errors import UserError
from eagle31.training.batch import PackedBatch


@dataclass(frozen=True)
class SourceStats:
    """How samples came that are made while training goes on."""

    waiting_bytes: int  # have arrived and are not yet taken
    starved_seconds: float  # states were asked for and not there
    full_seconds: float  # everything asked for was there, and the bound allowed no more
    num_restarts: int  # of producers


@runtime_checkable
class OrderedSource(HiddenStateSource, Protocol):
    """A source that makes samples ahead, if it is told in which order they will be asked for."""

    def expect(self, indices: Sequence[int]) -> None: ...
    def collect_stats(self) -> SourceStats: ...
    def stop(self) -> None: ...


class RowLoader:
    """This rank's packed rows of any optimizer step.

    The epochs' rows form one endless sequence; step s takes `rows_per_step` of it from s * rows_per_step on,
    and rank r every world_size-th of these. So the step number is all the state there is, and the same rows
    make up a step on any number of ranks.

    Args:
        row_tokens: the most tokens in a row.
        rows_per_step: over all ranks and micro-batches.
        pad_multiple: rows are padded to a multiple of this, at most to `row_tokens`.
        steps_ahead: read and held in memory while a step is trained.
        steps_announced: told to an `OrderedSource` before they are read; at most an epoch's.

    Raises:
        UserError: the rows of a step do not divide among the ranks, or there are too few for one step.
    """

    def __init__(
        self,
        source: HiddenStateSource,
        *,
        row_tokens: int,
        rows_per_step: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int,
        pad_multiple: int = 64,
        steps_ahead: int = 3,
        steps_announced: int = 64,
    ) -> None:
        self.source = source
        self.row_tokens = row_tokens
        self.rows_per_step = rows_per_step
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.pad_multiple = pad_multiple
        self.steps_ahead = steps_ahead
        self._packed = {0: pack_epoch(source.lengths, row_tokens, seed, epoch=0)}
        self.rows_per_epoch = len(self._packed[0])
        self.steps_announced = min(steps_announced, self.rows_per_epoch // rows_per_step)
        # One thread: the order in which steps are read is the order that is announced.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="row-loader")
        self._ahead: deque[tuple[int, Future[list[PackedBatch]]]] = deque()
        self._announced = 0  # the step up to which the source was told
        if rows_per_step % world_size:
            remedy = f"Must be a multiple of the {world_size} processes."
            raise UserError("train.rows_per_step", rows_per_step, remedy)
        if self.rows_per_epoch < rows_per_step:
            remedy = (
                f"The data fills {self.rows_per_epoch} rows of {row_tokens} tokens only; lower it or "
                "train.row_tokens, or add data."
            )
            raise UserError("train.rows_per_step", rows_per_step, remedy)

    @property
    def steps_per_epoch(self) -> float:
        """Not whole in general: the step at an epoch's end goes on into the next one."""
        return self.rows_per_epoch / self.rows_per_step

    def rows(self, step: int) -> list[list[int]]:
        """The sample indices of this rank's rows of a step."""
        start = step * self.rows_per_step
        return [self._row(i) for i in range(start + self.rank, start + self.rows_per_step, self.world_size)]

    def read_ahead(self, step: int) -> None:
        """Begins to read `steps_ahead` steps from this one on, in the background.

        A step that is not the next one starts anew there, which an `OrderedSource` does not take.
        """
        if self._ahead and self._ahead[0][0] != step:
            self._drop()
        start = self._ahead[-1][0] + 1 if self._ahead else step
        for ahead in range(start, step + self.steps_ahead):
            self._ahead.append((ahead, self._executor.submit(self._load, ahead)))

    def batches(self, step: int) -> list[PackedBatch]:
        """This rank's micro-batches of a step, one row each; those behind it are read meanwhile."""
        self.read_ahead(step)
        batches = self._ahead.popleft()[1].result()
        self.read_ahead(step + 1)
        return batches

    def collect_stats(self) -> SourceStats | None:
        """Since the last call; None when the samples lie in a store."""
        return self.source.collect_stats() if isinstance(self.source, OrderedSource) else None

    def close(self) -> None:
        """Ends the background thread, even where it waits for states."""
        if isinstance(self.source, OrderedSource):
            self.source.stop()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _drop(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _load(self, step: int) -> list[PackedBatch]:
        rows = self.rows(step)
        if isinstance(self.source, OrderedSource):
            self._announce(self.source, step)
        samples = iter(self.source.get_many([index for row in rows for index in row]))
        return [self._pack([next(samples) for _ in row]) for row in rows]

    def _pack(self, samples: list[CapturedSample]) -> PackedBatch:
        num_tokens = sum(len(sample.input_ids) for sample in samples)
        padded = max(-(-num_tokens // self.pad_multiple), 1) * self.pad_multiple
        return pack_row(samples, min(padded, self.row_tokens))

    def _announce(self, source: OrderedSource, step: int) -> None:
        """Tells the source what comes, from `step` on."""
        start = max(step, self._announced)
        self._announced = step + self.steps_announced
        for ahead in range(start, self._announced):
            source.expect([index for row in self.rows(ahead) for index in row])

    def _row(self, index: int) -> list[int]:
        epoch, place = divmod(index, self.rows_per_epoch)
        if epoch not in self._packed:
            # What is announced may be of the epoch behind the one that is read.
            packed = pack_epoch(self.source.lengths, self.row_tokens, self.seed, epoch)
            self._packed = {e: rows for e, rows in self._packed.items() if e == epoch - 1} | {epoch: packed}
        return self._packed[epoch][place]


def pack_row(samples: Sequence[CapturedSample], num_tokens: int) -> PackedBatch:
    """Lays the samples end to end and pads to `num_tokens`; in pinned memory where there is a GPU to copy to.

    Of samples without tokens, which stand for what could not be captured, nothing is seen in the row.
    """
    lengths = [len(sample.input_ids) for sample in samples if len(sample.input_ids)]
    documents = torch.arange(len(lengths))
    document_ids = documents.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    position_ids = [torch.arange(length) for length in lengths]

    def lay(parts: Sequence[Tensor], padding: int = 0) -> Tensor:
        shape = (num_tokens, *parts[0].shape[1:])
        row = torch.empty(shape, dtype=parts[0].dtype, pin_memory=torch.cuda.is_available())
        torch.cat(list(parts), out=row[: sum(lengths)])
        row[sum(lengths) :] = padding
        return row

    return PackedBatch(
        input_ids=lay([sample.input_ids for sample in samples]),
        loss_mask=lay([sample.loss_mask for sample in samples]),
        document_ids=lay([document_ids], padding=-1),
        position_ids=lay(position_ids or [document_ids]),
        aux_hidden_states=lay([sample.aux_hidden_states for sample in samples]),
        final_hidden_states=lay([sample.final_hidden_states for sample in samples]),
    )
