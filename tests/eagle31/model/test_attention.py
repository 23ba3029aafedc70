"""Attention run by run compared with one mask over all keys."""

import torch
from torch import Tensor

from eagle31.kernels.query_run import QueryRun, document_starts, query_runs
from eagle31.model.attention import LayerKeys, attend_by_run, rollout_attention

LENGTHS = (7, 1, 12, 4)
HEADS, KV_HEADS, DIM, VALUE_DIM, SCALE = 4, 2, 6, 5, 0.3


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_runs_give_what_one_mask_gives() -> None:
    torch.manual_seed(0)
    document_ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    rows = torch.tensor([0, 1, 2, 5, 6, 7, 9, 10, 19, 20, 23])
    runs = query_runs(rows, document_starts(document_ids))
    assert [tuple(run) for run in runs] == [
        (0, 3, 0, 3),
        (3, 5, 0, 7),
        (5, 6, 7, 8),
        (6, 8, 8, 11),
        (8, 9, 8, 20),
        (9, 10, 20, 21),
        (10, 11, 20, 24),
    ]
    keys = LayerKeys(normal(24, KV_HEADS, DIM), normal(24, KV_HEADS, VALUE_DIM))
    # The first step has two rows that are dropped before the second.
    kept = torch.tensor([0, 1, 3, 4, 5, 6, 7, 8, 10, 11, 12])
    keys = keys.with_step(normal(13, KV_HEADS, DIM), normal(13, KV_HEADS, VALUE_DIM)).for_rows(kept)
    keys = keys.with_step(normal(11, KV_HEADS, DIM), normal(11, KV_HEADS, VALUE_DIM))
    query = normal(11, HEADS, DIM)
    visible = (document_ids[rows, None] == document_ids) & (torch.arange(24) <= rows[:, None])
    expected = rollout_attention(
        query,
        keys.keys,
        keys.values,
        visible,
        [keys.rollout_keys[0][kept], keys.rollout_keys[1]],
        [keys.rollout_values[0][kept], keys.rollout_values[1]],
        SCALE,
    )
    torch.testing.assert_close(attend_by_run(query, keys, runs, SCALE), expected)


def test_one_query_reads_the_last_positions_of_its_window() -> None:
    """As in decoding: of ten keys and two rollout keys a window of five reads the last three and both."""
    torch.manual_seed(0)
    keys = LayerKeys(normal(10, KV_HEADS, DIM), normal(10, KV_HEADS, VALUE_DIM))
    for _ in range(2):
        keys = keys.with_step(normal(1, KV_HEADS, DIM), normal(1, KV_HEADS, VALUE_DIM))
    query, run = normal(1, HEADS, DIM), QueryRun(0, 1, 0, 10)
    rollout = keys.rollout_keys, keys.rollout_values
    expected = rollout_attention(query, keys.keys[-3:], keys.values[-3:], None, *rollout, SCALE)
    torch.testing.assert_close(attend_by_run(query, keys, [run], SCALE, window=5), expected)
    alone = attend_by_run(query, keys, [run], SCALE, window=1)
    torch.testing.assert_close(alone, keys.rollout_values[1].repeat_interleave(HEADS // KV_HEADS, dim=1))


def test_rows_are_dropped_twice() -> None:
    keys = LayerKeys(normal(3, 1, 2), normal(3, 1, 2)).with_step(normal(5, 1, 2), normal(5, 1, 2))
    keys = keys.for_rows(torch.tensor([0, 2, 3, 4])).with_step(normal(4, 1, 2), normal(4, 1, 2))
    keys = keys.for_rows(torch.tensor([1, 3]))
    assert [index.tolist() for index in keys.row_indices if index is not None] == [[2, 4], [1, 3]]


def test_no_queries_have_no_output() -> None:
    keys = LayerKeys(normal(3, KV_HEADS, DIM), normal(3, KV_HEADS, VALUE_DIM))
    assert attend_by_run(normal(0, HEADS, DIM), keys, (), SCALE).shape == (0, HEADS, VALUE_DIM)
