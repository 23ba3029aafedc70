"""The queries that a causal kernel computes together."""

from typing import NamedTuple


class QueryRun(NamedTuple):
    """Queries at consecutive rows of one document; they are the last rows of the keys that they may read."""

    query_start: int  # into the step's rows
    query_stop: int
    key_start: int  # into the schedule's key rows
    key_stop: int
