from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from data.batches.row_order import RowOrder, pack_epoch, windows_of

ROW_TOKENS, NUM_SAMPLES, NUM_FILES = 64, 400, 40
LENGTHS = np.random.default_rng(0).integers(3, 30, NUM_SAMPLES)
FILES = np.random.default_rng(1).permutation(np.arange(NUM_SAMPLES) % NUM_FILES)
WINDOW_TOKENS = 700  # about four files


def _order(seed: int = 0, window_tokens: int | None = WINDOW_TOKENS) -> RowOrder:
    return RowOrder(LENGTHS.tolist(), ROW_TOKENS, seed, files=FILES, window_tokens=window_tokens)


def _epoch(order: RowOrder, epoch: int) -> list[list[int]]:
    return [order.row(epoch, index) for index in range(order.rows_per_epoch)]


def test_without_windows_the_rows_are_packed_over_all_samples() -> None:
    order = _order(window_tokens=None)
    for epoch in (0, 3, 0):
        assert _epoch(order, epoch) == pack_epoch(LENGTHS, ROW_TOKENS, seed=0, epoch=epoch)


def test_every_epoch_has_every_sample_in_as_many_rows_that_fit() -> None:
    order = _order()
    for epoch in range(4):
        rows = _epoch(order, epoch)
        assert sorted(sample for row in rows for sample in row) == list(range(NUM_SAMPLES))
        assert max(LENGTHS[row].sum() for row in rows) <= ROW_TOKENS


def test_a_file_is_read_within_one_window() -> None:
    windows = windows_of(FILES, LENGTHS, WINDOW_TOKENS, seed=0)
    tokens = [int(LENGTHS[window].sum()) for window in windows]
    assert 3 < len(windows) < NUM_FILES / 2
    assert min(tokens[:-1]) >= WINDOW_TOKENS
    rows = _epoch(_order(), epoch=2)
    seen: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        for file in FILES[row]:
            seen.setdefault(int(file), []).append(index)
    # No file's rows are further apart than the rows of the largest window.
    most_rows = max(len(pack_epoch(LENGTHS[window], ROW_TOKENS, seed=0, epoch=2)) for window in windows)
    assert max(max(indices) - min(indices) for indices in seen.values()) < most_rows < len(rows) / 3
    # Shuffling over all samples has files in rows that are further apart.
    everywhere = [index for index, row in enumerate(_epoch(_order(window_tokens=None), 2)) if 0 in FILES[row]]
    assert max(everywhere) - min(everywhere) > most_rows


def test_windows_are_shuffled_and_so_are_the_rows_in_them() -> None:
    first, second = (_epoch(_order(), epoch) for epoch in (0, 1))
    assert _epoch(_order(), 0) == first
    assert _epoch(_order(seed=1), 0) != first
    window_of = np.empty(NUM_SAMPLES, dtype=int)
    for number, window in enumerate(windows_of(FILES, LENGTHS, WINDOW_TOKENS, seed=0)):
        window_of[window] = number
    orders = [[int(window_of[row[0]]) for row in rows] for rows in (first, second)]
    assert orders[0] != orders[1]
    for rows, order in zip((first, second), orders, strict=True):
        assert all((window_of[row] == number).all() for row, number in zip(rows, order, strict=True))
        assert sum(one != other for one, other in pairwise(order)) == len(set(order)) - 1
    # Samples of equal length are exchanged between the rows of a window from epoch to epoch.
    assert {frozenset(row) for row in first} != {frozenset(row) for row in second}


def test_only_the_windows_that_are_read_are_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []

    def pack(lengths: Sequence[int], row_tokens: int, seed: int, epoch: int) -> list[list[int]]:
        packed.append((epoch, len(lengths)))
        return pack_epoch(lengths, row_tokens, seed, epoch)

    order = _order()
    monkeypatch.setattr("data.batches.row_order.pack_epoch", pack)
    for index in range(10):
        order.row(7, index)
    assert 1 <= len(packed) <= 2
    assert all(epoch == 7 and num_samples < NUM_SAMPLES / 3 for epoch, num_samples in packed)
