import random

import pytest

from data.batches.row_order import balanced


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("rows_per_rank", [1, 2, 5])
def test_every_row_is_on_one_rank_and_every_rank_has_as_many(num_ranks: int, rows_per_rank: int) -> None:
    generator = random.Random(0)
    costs = [generator.choice([1.0, 2.0, 30.0]) for _ in range(num_ranks * rows_per_rank)]
    ranks = balanced(costs, num_ranks)
    assert {len(rows) for rows in ranks} == {rows_per_rank}
    assert sorted(index for rows in ranks for index in rows) == list(range(len(costs)))
    assert balanced(costs, num_ranks) == ranks


def test_ranks_have_about_the_same_work_at_any_time() -> None:
    generator = random.Random(1)
    waiting, was_waiting = 0.0, 0.0
    for _ in range(50):
        costs = [generator.uniform(0.1, 1) for _ in range(32)]
        mean = sum(costs) / 8
        waiting += max(sum(costs[i] for i in rows) for rows in balanced(costs, 8)) / mean - 1
        was_waiting += max(sum(costs[rank::8]) for rank in range(8)) / mean - 1
    assert waiting < 0.1 * was_waiting
    # The first rows of the ranks are the most expensive ones.
    first = {rows[0] for rows in balanced(costs, 8)}
    assert first == set(sorted(range(32), key=lambda index: -costs[index])[:8])
