"""The samples of each packed row, the order of the rows, and their division among the ranks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagle31.errors import UserError


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
