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

    def within(self, window: int | None) -> "QueryRun":
        """Return the run without the keys before the window of its first query; None keeps all keys.

        Args:
            window: the number of keys that each query reads, its own included.
        """
        if window is None:
            return self
        first = self.key_stop - self.num_queries - (window - 1)
        return self._replace(key_start=max(self.key_start, first))


def context_window(window: int | None, step: int) -> int | None:
    """Return how many step-0 keys a row reads at a step, its own included; None for all of them.

    A sliding window of W positions ends at the position of the query, which at step k is k positions after
    the row. Its last k positions are those of the row's rollout keys, so W - k are those of step-0 keys.
    """
    return None if window is None else max(window - step, 0)


def document_starts(document_ids: Tensor) -> Tensor:
    """Return the first row of each row's document. int64 [S], grouped by document -> int64 [S]."""
    _, lengths = document_ids.unique_consecutive(return_counts=True)
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def segment_starts(rows: Tensor, document_ids: Tensor) -> Tensor:
    """Return where each row's segment starts among the rows: consecutive rows of one document.

    Args:
        rows: int64 [S], ascending.
        document_ids: int64 [T], grouped by document.

    Returns:
        int64 [S], indices into the rows.
    """
    begins = torch.ones_like(rows, dtype=torch.bool)
    documents = document_ids[rows]
    begins[1:] = (rows[1:] != rows[:-1] + 1) | (documents[1:] != documents[:-1])
    return document_starts(begins.cumsum(0))


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
