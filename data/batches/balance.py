"""Distributing the rows of a step over the ranks so that no rank waits long for another."""

from collections.abc import Sequence


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
