import random

from data.batches.row_order import balanced


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
