"""The rows that a training step computes, worked out on the CPU before the step starts.

Lengths and bounds are host integers, so that the step never waits for the device to read them.

One document of seven tokens, of which the assistant wrote x[3] .. x[6], and three steps: the pairs (t, k)
that are supervised, each with the index j = t+1+k of the token that it reads and of its teacher.

    index        0   1   2   3   4   5   6
    written      -   -   -   x   x   x   x
    key rows     *   *   *   *   *                the rows that a query reads
    step 0               2>3 3>4 4>5              t > j; predicts j + 1
    step 1               2>4 3>5
    step 2               2>5
    teachers                 *   *   *            each computed once, for all steps
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle31.kernels.query_run import QueryRun, document_starts, query_runs, segment_starts
from eagle31.kernels.transfer import to_device
from eagle31.training.batch import step_rows


@dataclass(frozen=True)
class StepSchedule:
    """The rows of one speculation step, ascending. A row is dropped after its last supervised step."""

    rows: Tensor  # int64 [R], into the T rows
    previous_index: Tensor | None  # int64 [R], into the rows of the step before; None when they are the same
    first_index: Tensor | None  # int64 [R], into the rows of step 0; None when they are the same
    runs: tuple[QueryRun, ...]  # the rows as queries of the key rows
    teacher_index: Tensor  # int64 [R], into the chunk's teacher rows, ascending
    teacher_index_host: Tensor  # the same on the CPU


@dataclass(frozen=True)
class ChunkSchedule:
    """The rows that are rolled out together: J teacher distributions, K steps."""

    query_index: Tensor  # int64 [R], the rows of step 0, into the key rows
    # int64 [J], the indices j = t+1+k: a supervised (row, step) pair reads the token at j, and its teacher is
    # the target's distribution at j.
    teacher_rows: Tensor
    teacher_rows_host: Tensor  # the same on the CPU
    steps: tuple[StepSchedule, ...]  # K
    longest_document: int  # the most keys of a document of the packed row


@dataclass(frozen=True)
class RolloutSchedule:
    """The rows of a training step: S keys, and chunks of the rows that read them."""

    key_rows: Tensor  # int64 [S], the rows that some query reads
    key_rows_host: Tensor  # the same on the CPU
    document_runs: tuple[QueryRun, ...]  # every key row as a query
    chunks: tuple[ChunkSchedule, ...]  # at least one
    chunk_rows: int | None  # rows of a chunk; None where one chunk has all
    key_part: slice  # the key rows that this rank computes, all of them unless ranks share the row
    weight: float = 1.0  # of the loss: how many supervised rows each stands for

    def to(self, device: torch.device) -> "RolloutSchedule":
        """Copy a schedule that is on the CPU to `device`, in one transfer."""
        steps = [step for chunk in self.chunks for step in chunk.steps]
        host = [x for part in (self, *self.chunks, *steps) for x in _device_tensors(part).values()]
        moved = dict(zip(map(id, host), to_device(host, device), strict=True))

        def copied(part: Any, **inner: Any) -> Any:
            return replace(part, **inner, **{name: moved[id(x)] for name, x in _device_tensors(part).items()})

        chunks = [copied(chunk, steps=tuple(copied(step) for step in chunk.steps)) for chunk in self.chunks]
        return copied(self, chunks=tuple(chunks))


def _device_tensors(part: Any) -> dict[str, Tensor]:
    """Return what a device reads of a part of a schedule."""
    names = [field.name for field in fields(part) if not field.name.endswith("_host")]
    return {name: x for name in names if isinstance(x := getattr(part, name), Tensor)}


class RowShare(NamedTuple):
    """What one of the ranks that share a row computes of it."""

    key_part: slice  # of the key rows
    drafts: slice  # of the rows that are rolled out


class DraftCosts(NamedTuple):
    """What the drafts of a row cost, in any unit."""

    row: float  # of its products
    pair: float  # of its attention to one key of step 0
    window: int | None  # the most keys that it reads


def schedule_rollout(
    supervised: Tensor,
    document_ids: Tensor,
    device: torch.device | None = None,
    key_reach: int | None = None,
    chunk_rows: int | None = None,
    weight: float = 1.0,
    share: RowShare | None = None,
) -> RolloutSchedule:
    """Schedule the rollout of the supervised (row, step) pairs.

    Args:
        supervised: bool [T, K] on the CPU; a step may be true only where the step before is.
        document_ids: int64 [T] on the CPU, grouped by document.
        device: where the schedule's tensors go; the CPU by default.
        key_reach: `DrafterConfig.key_reach`; None keeps the keys of all rows before a query.
        chunk_rows: rows that are rolled out together; None for all.
        weight: of the loss.
        share: what this rank computes of the row; None for all.
    """
    rows = step_rows(supervised)
    key_rows = needed_key_rows(rows[0], document_ids, key_reach)
    share = share or RowShare(slice(0, len(key_rows)), slice(0, len(rows[0])))
    starts = segment_starts(key_rows, document_ids)
    document_runs = query_runs(torch.arange(len(key_rows)), starts)
    longest = max((run.num_keys for run in document_runs), default=0)
    pieces = rows[0][share.drafts].split(chunk_rows or max(len(rows[0]), 1))
    schedule = RolloutSchedule(
        key_rows=key_rows,
        key_rows_host=key_rows,
        document_runs=document_runs,
        chunks=tuple(_schedule_chunk(_between(rows, piece), key_rows, starts, longest) for piece in pieces),
        chunk_rows=chunk_rows,
        weight=weight,
        key_part=share.key_part,
    )
    return schedule if device is None else schedule.to(device)


def row_shares(
    supervised: Tensor, document_ids: Tensor, key_reach: int | None, costs: DraftCosts, num_shares: int
) -> list[RowShare]:
    """Divide a row among ranks: each has as many keys, and drafts that cost about the same.

    Args:
        supervised, document_ids, key_reach: those of `schedule_rollout`.
    """
    rows = step_rows(supervised)[0]
    num_keys = len(needed_key_rows(rows, document_ids, key_reach))
    read = rows - document_starts(document_ids)[rows] + 1
    if costs.window is not None:
        read = read.clamp(max=costs.window)
    spent = (costs.row + costs.pair * read.double()).cumsum(0)
    total = float(spent[-1]) if len(rows) else 0.0
    ends = torch.searchsorted(spent, total * torch.arange(1, num_shares) / num_shares).tolist()
    size = keys_of_share(num_keys, num_shares)
    return [
        RowShare(slice(min(index * size, num_keys), min((index + 1) * size, num_keys)), slice(start, end))
        for index, (start, end) in enumerate(pairwise([0, *ends, len(rows)]))
    ]


def keys_of_share(num_keys: int, num_shares: int) -> int:
    """Return the key rows of each share; the last ones may have fewer."""
    return max(1, -(-num_keys // num_shares))


def needed_states(
    supervised: Tensor, document_ids: Tensor, key_reach: int | None, share: RowShare
) -> tuple[Tensor, Tensor]:
    """Return the rows of the aux and of the final hidden states that a share reads, int64, ascending."""
    rows = step_rows(supervised)
    key_rows = needed_key_rows(rows[0], document_ids, key_reach)
    return key_rows[share.key_part], teacher_rows(_between(rows, rows[0][share.drafts]))


def _between(rows: Sequence[Tensor], piece: Tensor) -> list[Tensor]:
    """Return each step's rows from the first to the last of a piece of step 0's."""
    first, last = (int(piece[0]), int(piece[-1])) if len(piece) else (0, -1)
    return [step[(step >= first) & (step <= last)] for step in rows]


def teacher_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return the indices of the teachers of each step's rows, int64 [J], ascending."""
    return torch.cat([of_step + 1 + step for step, of_step in enumerate(rows)]).unique()


def _schedule_chunk(
    rows: Sequence[Tensor], key_rows: Tensor, starts: Tensor, longest_document: int
) -> ChunkSchedule:
    """Schedule the rollout of `rows`, int64 [R_k] for each step, among the keys that all chunks read."""
    teachers = teacher_rows(rows)
    steps = []
    for step, of_step in enumerate(rows):
        teacher_index = torch.searchsorted(teachers, of_step + 1 + step)
        steps.append(
            StepSchedule(
                rows=of_step,
                previous_index=_index_within(of_step, rows[max(step - 1, 0)]),
                first_index=_index_within(of_step, rows[0]),
                runs=query_runs(torch.searchsorted(key_rows, of_step), starts),
                teacher_index=teacher_index,
                teacher_index_host=teacher_index,
            )
        )
    queries = torch.searchsorted(key_rows, rows[0])
    return ChunkSchedule(queries, teachers, teachers, tuple(steps), longest_document)


def _index_within(rows: Tensor, superset: Tensor) -> Tensor | None:
    """Return the indices of `rows` within the ascending `superset`; None when they are all of it."""
    if len(rows) == len(superset):
        return None
    return torch.searchsorted(superset, rows)


def needed_key_rows(rows: Tensor, document_ids: Tensor, key_reach: int | None) -> Tensor:
    """Return the rows whose step-0 keys some query reads, int64 [S], ascending.

    Without a window they are each document's rows up to its last query. With one they are those that a query
    reaches, in as many segments as there are turns far from each other.

    Args:
        rows: int64 [R], the queries, ascending.
        document_ids: int64 [T], grouped by document.
        key_reach: `DrafterConfig.key_reach`.
    """
    first = document_starts(document_ids)[rows]
    if key_reach is not None:
        first = torch.maximum(first, rows - key_reach)
    change = torch.zeros(len(document_ids) + 1, dtype=torch.long)
    one = torch.ones_like(rows)
    change.index_add_(0, first, one).index_add_(0, rows + 1, -one)
    return torch.nonzero(change.cumsum(0)[:-1]).squeeze(1)
