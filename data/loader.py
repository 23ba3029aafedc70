"""From samples to the packed rows of each optimizer step, read ahead in the background."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.nn.functional import pad

from data.packing import pack_epoch
from data.samples import CapturedSample, HiddenStateSource
from eagle31.batch import PackedBatch
from eagle31.errors import UserError


class RowLoader:
    """This rank's packed rows of any optimizer step.

    The epochs' rows form one endless sequence; step s takes `rows_per_step` of it from s * rows_per_step on,
    and rank r every world_size-th of these. So the step number is all the state there is, and the same rows
    make up a step on any number of ranks.

    Args:
        row_tokens: the most tokens in a row.
        rows_per_step: over all ranks and micro-batches.
        pad_multiple: rows are padded to a multiple of this, at most to `row_tokens`.

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
    ) -> None:
        self.source = source
        self.row_tokens = row_tokens
        self.rows_per_step = rows_per_step
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.pad_multiple = pad_multiple
        self._packed: tuple[int, list[list[int]]] = (0, pack_epoch(source.lengths, row_tokens, seed, epoch=0))
        self.rows_per_epoch = len(self._packed[1])
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="row-loader")
        self._ahead: tuple[int, Future[list[PackedBatch]]] | None = None
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

    def batches(self, step: int) -> list[PackedBatch]:
        """This rank's micro-batches of a step, one row each; the next step is read meanwhile."""
        if self._ahead is not None and self._ahead[0] == step:
            batches = self._ahead[1].result()
        else:
            batches = self._executor.submit(self._load, step).result()
        self._ahead = (step + 1, self._executor.submit(self._load, step + 1))
        return batches

    def close(self) -> None:
        """Ends the background thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _load(self, step: int) -> list[PackedBatch]:
        rows = self.rows(step)
        # One request for all rows lets an online target batch them.
        samples = iter(self.source.get_many([index for row in rows for index in row]))
        return [self._pack([next(samples) for _ in row]) for row in rows]

    def _pack(self, samples: list[CapturedSample]) -> PackedBatch:
        num_tokens = sum(len(sample.input_ids) for sample in samples)
        multiple = self.pad_multiple
        return pack_row(samples, min(-(-num_tokens // multiple) * multiple, self.row_tokens))

    def _row(self, index: int) -> list[int]:
        epoch, place = divmod(index, self.rows_per_epoch)
        if self._packed[0] != epoch:
            self._packed = (epoch, pack_epoch(self.source.lengths, self.row_tokens, self.seed, epoch))
        return self._packed[1][place]


def pack_row(samples: Sequence[CapturedSample], num_tokens: int) -> PackedBatch:
    """Lays the samples end to end and pads to `num_tokens`."""
    lengths = [len(sample.input_ids) for sample in samples]
    padding = num_tokens - sum(lengths)
    document_ids = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths))
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    return PackedBatch(
        input_ids=pad(torch.cat([sample.input_ids for sample in samples]), (0, padding)),
        loss_mask=pad(torch.cat([sample.loss_mask for sample in samples]), (0, padding)),
        document_ids=pad(document_ids, (0, padding), value=-1),
        position_ids=pad(position_ids, (0, padding)),
        aux_hidden_states=pad(torch.cat([s.aux_hidden_states for s in samples]), (0, 0, 0, 0, 0, padding)),
        last_hidden_states=pad(torch.cat([s.last_hidden_states for s in samples]), (0, 0, 0, padding)),
    )
