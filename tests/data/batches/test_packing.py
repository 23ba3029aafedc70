import numpy as np
import pytest

from data.batches.row_order import pack_epoch
from eagle31.errors import UserError

ROW_TOKENS = 2048


def _gsm8k_like_lengths(num_samples: int) -> list[int]:
    """Draw log-normal lengths with the median (about 145 tokens) and the spread of GSM8K."""
    lengths = np.random.default_rng(0).lognormal(mean=5.0, sigma=0.4, size=num_samples)
    return [int(length) for length in lengths.clip(20, 1000)]


def test_every_sample_is_in_one_row_that_fits() -> None:
    lengths = _gsm8k_like_lengths(500)
    rows = pack_epoch(lengths, ROW_TOKENS, seed=0, epoch=3)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(sum(lengths[i] for i in row) <= ROW_TOKENS for row in rows)


def test_at_most_two_percent_is_padding() -> None:
    lengths = _gsm8k_like_lengths(2000)
    rows = pack_epoch(lengths, ROW_TOKENS, seed=0, epoch=0)
    assert 1 - sum(lengths) / (len(rows) * ROW_TOKENS) < 0.02


def test_epochs_differ_in_rows_and_not_in_their_number() -> None:
    lengths = _gsm8k_like_lengths(300)
    first, again, second, other = (
        pack_epoch(lengths, ROW_TOKENS, seed, epoch) for seed, epoch in [(0, 0), (0, 0), (0, 1), (1, 0)]
    )
    assert first == again
    assert first != second
    assert first != other
    assert len(first) == len(second) == len(other)
    assert {frozenset(row) for row in first} != {frozenset(row) for row in second}


def test_a_sample_longer_than_a_row_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"train\.row_tokens=10: Sample 1 has 11 tokens"):
        pack_epoch([3, 11], row_tokens=10, seed=0, epoch=0)
