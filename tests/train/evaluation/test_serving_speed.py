from typing import Any

import pytest

from train.evaluation.serving_speed import speed_rows


def measurement(k: int, round_index: int, users: int, tokens: list[int], seconds: list[float]) -> dict:
    first = round_index * len(tokens)
    return {
        "k": k,
        "round": round_index,
        "concurrency": users,
        "prompts": [(first + index) % 3 for index in range(len(tokens))],
        "num_tokens": tokens,
        "seconds": seconds,
        "num_forwards": 40,
        "num_decoded": 40 * (1 + k // 2),
    }


# Prompts 0 and 1, then 2 and 0.
MEASUREMENTS = [
    measurement(4, 1, 1, [30, 10], [2.0, 0.5]),
    measurement(0, 1, 1, [30, 10], [4.0, 2.0]),
    measurement(0, 0, 1, [10, 50], [2.0, 12.0]),
    measurement(4, 0, 1, [10, 50], [0.5, 7.0]),
    measurement(0, 0, 8, [10], [4.0]),
    measurement(4, 0, 8, [10], [5.0]),
]


def test_the_speed_up_is_the_quotient_of_the_rates_next_to_it() -> None:
    one, eight = speed_rows(MEASUREMENTS)
    assert [(row["concurrency"], row["k"]) for row in (one, eight)] == [(1, 4), (8, 4)]
    assert (one["plain"], one["drafter"]) == (100 / 20, 100 / 10)
    assert one["speedup"]["value"] == 2.0
    assert one["speedup"]["low"] < 2.0 < one["speedup"]["high"]
    assert one["acceptance_length"] == 3.0
    assert eight["speedup"]["value"] == 4 / 5  # of one prompt, which has no interval


def test_the_interval_is_over_prompts_and_not_over_their_repetitions() -> None:
    """All rounds repeat two prompts, of which one is twice as fast and the other as fast as before."""
    rounds: list[dict[str, Any]] = []
    for number in range(20):
        where = {"round": number, "concurrency": 1, "prompts": [0, 1], "num_tokens": [10, 10]}
        counts = {"num_forwards": 1, "num_decoded": 1}
        rounds.append({"k": 0, "seconds": [2.0, 2.0], **where, **counts})
        rounds.append({"k": 4, "seconds": [1.0, 2.0], **where, **counts})
    [row] = speed_rows(rounds)
    assert row["speedup"]["value"] == pytest.approx(4 / 3)
    assert (row["speedup"]["low"], row["speedup"]["high"]) == (1.0, 2.0)
