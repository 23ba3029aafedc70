"""Choosing the samples of each row."""

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
