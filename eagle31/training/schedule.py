"""Which rows a training step computes, worked out on the CPU before it starts.

Lengths and bounds are host integers, so that nothing inside the step has to ask the device for them.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eagle31.kernels.query_run import QueryRun


@dataclass(frozen=True)
class StepSchedule:
    """The rows of one speculation step, ascending. A row is dropped once none of its later steps counts."""

    rows: Tensor  # int64 [R], into the T rows
    kept: Tensor | None  # int64 [R], into the rows of the step before; None when they are the same
    first: Tensor | None  # int64 [R], into the rows of step 0; None when they are the same
    runs: tuple[QueryRun, ...]
    token_index: Tensor  # int64 [R], into the schedule's tokens: what the row reads beside its state
    teacher_index: Tensor  # int64 [R], into the schedule's teacher rows, ascending
    teacher_index_host: Tensor  # the same on the CPU


@dataclass(frozen=True)
class RolloutSchedule:
    """S keys, U tokens, J teacher distributions, K steps."""

    key_rows: Tensor  # int64 [S], the rows that a query may read, and no others
    first_queries: Tensor  # int64 [R], the rows of step 0 within the key rows
    tokens: Tensor  # int64 [U], the indices j whose embedding some row reads
    key_token_index: Tensor  # int64 [S], into the tokens: what each key row reads
    # int64 [J], the indices j = t+1+k: a counted pair reads the token there, and is held against the target's
    # distribution there.
    teacher_rows: Tensor
    teacher_token_index: Tensor  # int64 [J], into the tokens
    steps: tuple[StepSchedule, ...]  # K
    documents: tuple[QueryRun, ...]  # every key row as a query


def schedule_rollout(
    counted: Tensor, document_ids: Tensor, device: torch.device | None = None
) -> RolloutSchedule:
    """Lays out the rollout of the counted (row, step) pairs.

    Args:
        counted: bool [T, K] on the CPU; a step may be counted only where the one before is.
        document_ids: int64 [T] on the CPU, in runs.
        device: where the schedule's tensors go; the batch's.
    """
    device = device or counted.device
    rows = [torch.nonzero(column).squeeze(1) for column in counted.unbind(1)]
    key_rows = _key_rows(rows[0], document_ids)
    needed = torch.zeros(counted.shape[0] + counted.shape[1], dtype=torch.bool)
    for step, own in enumerate(rows):
        needed[own + 1 + step] = True
    teacher_rows = torch.nonzero(needed).squeeze(1)
    documents = _document_starts(key_rows, document_ids)
    # Behind the row's end, where no step counts, the token is arbitrary.
    last = len(document_ids) - 1
    tokens_of_keys, tokens_of_rows = (key_rows + 1).clamp(max=last), teacher_rows.clamp(max=last)
    tokens = torch.cat((tokens_of_keys, tokens_of_rows)).unique()
    token_index = torch.searchsorted(tokens, tokens_of_rows)
    steps = []
    for step, own in enumerate(rows):
        before = rows[max(step - 1, 0)]
        teacher_index = torch.searchsorted(teacher_rows, own + 1 + step)
        steps.append(
            StepSchedule(
                rows=own.to(device, non_blocking=True),
                kept=_places(own, before, device),
                first=_places(own, rows[0], device),
                runs=_runs(own, key_rows, documents),
                token_index=token_index[teacher_index].to(device, non_blocking=True),
                teacher_index=teacher_index.to(device, non_blocking=True),
                teacher_index_host=teacher_index,
            )
        )
    first_queries = torch.searchsorted(key_rows, rows[0])
    return RolloutSchedule(
        key_rows=key_rows.to(device, non_blocking=True),
        first_queries=first_queries.to(device, non_blocking=True),
        tokens=tokens.to(device, non_blocking=True),
        key_token_index=torch.searchsorted(tokens, tokens_of_keys).to(device, non_blocking=True),
        teacher_rows=teacher_rows.to(device, non_blocking=True),
        teacher_token_index=token_index.to(device, non_blocking=True),
        steps=tuple(steps),
        documents=_runs(key_rows, key_rows, documents),
    )


def _places(rows: Tensor, among: Tensor, device: torch.device) -> Tensor | None:
    """Where `rows` stand in the ascending `among`; None when they are all of it."""
    if len(rows) == len(among):
        return None
    return torch.searchsorted(among, rows).to(device, non_blocking=True)


def _key_rows(rows: Tensor, document_ids: Tensor) -> Tensor:
    """Each document from its start to its last query: nothing behind it is ever read."""
    _, lengths = document_ids.unique_consecutive(return_counts=True)
    stops = lengths.cumsum(0)
    starts = stops - lengths
    last = torch.searchsorted(rows, stops) - 1  # the last query before the document's end
    padded = torch.cat((rows, rows.new_zeros(1)))  # so that -1, no query so far, can be looked up
    ends = torch.where(last >= 0, padded[last] + 1, 0)
    parts = [
        torch.arange(start, end)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        if end > start
    ]
    return torch.cat(parts) if parts else rows


def _document_starts(key_rows: Tensor, document_ids: Tensor) -> Tensor:
    """int64 [S]: the place among the key rows where each one's document starts."""
    if not len(key_rows):
        return key_rows
    _, lengths = document_ids[key_rows].unique_consecutive(return_counts=True)
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def _runs(rows: Tensor, key_rows: Tensor, document_starts: Tensor) -> tuple[QueryRun, ...]:
    """Splits ascending `rows` where one is left out, or a document ends."""
    if not len(rows):
        return ()
    at = torch.searchsorted(key_rows, rows)
    starts = document_starts[at]
    new = torch.ones_like(rows, dtype=torch.bool)
    new[1:] = (rows[1:] != rows[:-1] + 1) | (starts[1:] != starts[:-1])
    bounds = [*torch.nonzero(new).squeeze(1).tolist(), len(rows)]
    return tuple(
        QueryRun(start, stop, int(starts[start]), int(at[stop - 1]) + 1) for start, stop in pairwise(bounds)
    )
