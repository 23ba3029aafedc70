"""Attention queries grouped by document, and the keys that each group may read."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class QueryRun(NamedTuple):
    """Queries at consecutive rows of one document.

    They are the last rows of the keys that they may read, so the causal mask follows from the bounds.
    """

    query_start: int  # index into the queries
    query_stop: int
    key_start: int  # index into the step-0 keys
    key_stop: int

    @property
    def num_queries(self) -> int:
        return self.query_stop - self.query_start

    @property
    def num_keys(self) -> int:
        return self.key_stop - self.key_start


def document_starts(document_ids: Tensor) -> Tensor:
    """Return the first row of each row's document. int64 [S], grouped by document -> int64 [S]."""
    _, lengths = document_ids.unique_consecutive(return_counts=True)
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def query_runs(key_index: Tensor, starts: Tensor) -> tuple[QueryRun, ...]:
    """Split queries into runs, at gaps and where a document ends.

    Args:
        key_index: int64 [R], each query's own key, ascending.
        starts: int64 [S], `document_starts` of the keys.
    """
    if not len(key_index):
        return ()
    first_keys = starts[key_index]
    begins = torch.ones_like(key_index, dtype=torch.bool)
    begins[1:] = (key_index[1:] != key_index[:-1] + 1) | (first_keys[1:] != first_keys[:-1])
    bounds = [*torch.nonzero(begins).squeeze(1).tolist(), len(key_index)]
    return tuple(
        QueryRun(start, stop, int(first_keys[start]), int(key_index[stop - 1]) + 1)
        for start, stop in pairwise(bounds)
    )


def tiles(runs: Sequence[QueryRun], size: int) -> list[QueryRun]:
    """Split runs into runs of at most `size` queries."""
    found = []
    for run in runs:
        for start in range(run.query_start, run.query_stop, size):
            stop = min(start + size, run.query_stop)
            found.append(QueryRun(start, stop, run.key_start, run.key_stop - (run.query_stop - stop)))
    return found
