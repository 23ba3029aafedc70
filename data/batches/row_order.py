"""The samples of each packed row, the order of the rows, and their division among the ranks."""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from eagle31.errors import UserError

# Rows are read in their order, and announced or looked up again shortly before or after.
_KEPT_EPOCHS, _KEPT_WINDOWS = 2, 4


class RowOrder:
    """The rows of every epoch, packed when they are first asked for.

    Without windows every row can have any samples, and reading jumps through the whole store. With windows,
    the files of a store are joined in random order into windows, and the samples are packed and shuffled
    within their window: a file is read during one window only, which suits object storage, caches and
    network file systems that read ahead. The windows come in another order in every epoch, and a row has
    other samples; a window always has the same files, so every epoch has the same number of rows.

    Any thread may call the methods.

    Args:
        lengths: the number of tokens of each sample, at least 1.
        row_tokens: the maximum number of tokens in a row.
        files: the file of each sample, from 0, [num_samples]; needed with `window_tokens`.
        window_tokens: the tokens that a window has at least, except for the last one; None for no windows.
        begin_epoch: the epoch that is read first.

    Raises:
        UserError: a sample is longer than a row.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray,
        row_tokens: int,
        seed: int,
        *,
        files: NDArray | None = None,
        window_tokens: int | None = None,
        begin_epoch: int = 0,
    ) -> None:
        self._lengths, self._row_tokens, self._seed = np.asarray(lengths), row_tokens, seed
        self._windows: list[NDArray] | None = None
        if window_tokens is not None:
            assert files is not None
            self._windows = windows_of(files, self._lengths, window_tokens, seed)
        self._packed: OrderedDict[tuple[int, int], list[list[int]]] = OrderedDict()
        self._ends: dict[int, tuple[NDArray, NDArray]] = {}
        self._lock = Lock()
        num_windows = 1 if self._windows is None else len(self._windows)
        self._num_rows = np.array([len(self._rows(begin_epoch, window)) for window in range(num_windows)])
        self.rows_per_epoch = int(self._num_rows.sum())

    def row(self, epoch: int, index: int) -> list[int]:
        """Return the samples of a row of an epoch."""
        if self._windows is None:
            return self._rows(epoch, 0)[index]
        order, ends = self._window_order(epoch)
        position = int(np.searchsorted(ends, index, side="right"))
        start = int(ends[position - 1]) if position else 0
        return self._rows(epoch, int(order[position]))[index - start]

    def _window_order(self, epoch: int) -> tuple[NDArray, NDArray]:
        """Return an epoch's windows in their order, and the row after each one's last."""
        with self._lock:
            if epoch not in self._ends:
                generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
                order = generator.permutation(len(self._num_rows))
                self._ends = {e: kept for e, kept in self._ends.items() if abs(e - epoch) < _KEPT_EPOCHS}
                self._ends[epoch] = order, self._num_rows[order].cumsum()
            return self._ends[epoch]

    def _rows(self, epoch: int, window: int) -> list[list[int]]:
        with self._lock:
            rows = self._packed.get((epoch, window))
            if rows is None:
                rows = self._packed[epoch, window] = self._pack(epoch, window)
            self._packed.move_to_end((epoch, window))
            while len(self._packed) > (_KEPT_EPOCHS if self._windows is None else _KEPT_WINDOWS):
                self._packed.popitem(last=False)
            return rows

    def _pack(self, epoch: int, window: int) -> list[list[int]]:
        if self._windows is None:
            return pack_epoch(self._lengths, self._row_tokens, self._seed, epoch)
        samples = self._windows[window]
        rows = pack_epoch(self._lengths[samples], self._row_tokens, self._seed, epoch)
        return [samples[row].tolist() for row in rows]


def windows_of(files: NDArray, lengths: NDArray, window_tokens: int, seed: int) -> list[NDArray]:
    """Join files in random order until each window has enough tokens.

    Args:
        files: the file of each sample, [num_samples].
        lengths: the number of tokens of each sample, [num_samples].

    Returns:
        The samples of each window.
    """
    order = np.argsort(files, kind="stable")
    samples = np.split(order, np.flatnonzero(np.diff(files[order])) + 1)
    tokens = [int(lengths[of_file].sum()) for of_file in samples]
    windows: list[list[NDArray]] = [[]]
    num_tokens = 0
    for file in np.random.Generator(np.random.PCG64(seed)).permutation(len(samples)):
        if num_tokens >= window_tokens:
            windows.append([])
            num_tokens = 0
        windows[-1].append(samples[file])
        num_tokens += tokens[file]
    return [np.concatenate(window) for window in windows]


def pack_epoch(lengths: Sequence[int] | NDArray, row_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Pack every sample once into rows of at most `row_tokens` tokens: shuffled best-fit decreasing.

    Packing the longest samples first wastes the fewest tokens. It also gives every epoch the same number of
    rows, so that the rows of a step are known without packing the earlier epochs. Samples of equal length are
    exchanged from epoch to epoch, and the rows are shuffled.

    Args:
        lengths: the number of tokens of each sample, at least 1.

    Returns:
        The sample indices of each row.

    Raises:
        UserError: a sample is longer than a row.
    """
    if len(lengths) and max(lengths) > row_tokens:
        longest = int(np.argmax(lengths))
        remedy = f"Sample {longest} has {lengths[longest]} tokens; raise this, or lower data.max_tokens."
        raise UserError("train.row_tokens", row_tokens, remedy)
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    shuffled = generator.permutation(len(lengths))
    samples = shuffled[np.argsort(-np.asarray(lengths)[shuffled], kind="stable")]
    rows = _best_fit([int(i) for i in samples], lengths, row_tokens)
    return [rows[i] for i in generator.permutation(len(rows))]


def _best_fit(samples: Sequence[int], lengths: Sequence[int] | NDArray, row_tokens: int) -> list[list[int]]:
    """Put each sample, in order, into the row in which it leaves the least room."""
    rows: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(row_tokens + 1)]
    rooms = 0  # bit r is set if and only if some row has room for exactly r tokens
    for sample in samples:
        length = int(lengths[sample])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(sample)
        rows_by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows


def balanced(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Return the indices of the rows of each rank, as many for every rank.

    The rows are taken from the most to the least expensive, one for every rank at a time: the rank with the
    least work so far gets the most expensive one. Rows that the ranks compute at the same time therefore also
    cost about the same, which matters under ZeRO 3, whose every forward pass is collective.

    Args:
        costs: of each row; their number is a multiple of `num_ranks`.
    """
    assert len(costs) % num_ranks == 0
    order = sorted(range(len(costs)), key=lambda index: -costs[index])  # equal costs stay in their order
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, index in zip(ranks, order[start : start + num_ranks], strict=True):
            rows[rank].append(index)
            totals[rank] += costs[index]
    return rows
