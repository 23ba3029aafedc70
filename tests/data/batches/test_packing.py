import numpy as np
import pytest

from data.batches.packing import pack_epoch
from eagle31.errors import UserError

ROW_TOKENS = 2048


def _gsm8k_like_lengths(num_samples: int) -> list[int]:
    """Log-normal with GSM8K's median of about 145 tokens and its spread."""
    lengths = np.random.default_rng(0).lognormal(mean=5.0, sigma=0.4, size=num_samples)
    return [int(length) for length in lengths.clip(20, 1000)]


def test_every_sample_once_in_rows_that_fit() -> None:
    lengths = _gsm8k_like_lengths(500)
    rows = pack_epoch(lengths, ROW_TOKENS, seed=0, epoch=3)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(sum(lengths[i] for i in row) <= ROW_TOKENS for row in rows)


def test_little_is_wasted() -> None:
    lengths = _gsm8k_like_lengths(2000)
    rows = pack_epoch(lengths, ROW_TOKENS, seed=0, epoch=0)
    assert 1 - sum(lengths) / (len(rows) * ROW_TOKENS) < 0.02


def test_best_fit() -> None:
    # Into the fullest row that still takes it: 4 beside 6, 3 beside 7.
    rows = pack_epoch([6, 7, 3, 4], row_tokens=10, seed=0, epoch=0)
    assert sorted(map(sorted, rows)) == [[0, 3], [1, 2]]


def test_epochs_differ_in_order_only() -> None:
    lengths = _gsm8k_like_lengths(300)
    first, again, second, other = (
        pack_epoch(lengths, ROW_TOKENS, seed, epoch) for seed, epoch in [(0, 0), (0, 0), (0, 1), (1, 0)]
    )
    assert first == again
    assert first != second
    assert first != other
    assert len(first) == len(second) == len(other)
    assert {frozenset(row) for row in first} != {frozenset(row) for row in second}


def test_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.row_tokens=10: Sample 1 has 11 tokens"):
        pack_epoch([3, 11], row_tokens=10, seed=0, epoch=0)
