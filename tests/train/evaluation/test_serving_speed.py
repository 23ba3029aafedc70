from typing import Any

import pytest

from train.evaluation.serving_speed import speed_rows


def measurement(k: int, round_index: int, concurrency: int, rates: list[float]) -> dict[str, Any]:
    return {
        "k": k,
        "round": round_index,
        "concurrency": concurrency,
        "request_rates": rates,
        "num_forwards": 40,
        "num_decoded": 40 * (1 + k // 2),
    }


# In round 1 the machine was half as fast, which leaves the ratio unchanged.
MEASUREMENTS = [
    measurement(4, 1, 1, [10.0, 10.0]),
    measurement(0, 1, 1, [5.0, 5.0]),
    measurement(0, 0, 1, [10.0, 10.0]),
    measurement(4, 0, 1, [20.0, 24.0]),
    measurement(0, 2, 1, [11.0, 9.0]),
    measurement(4, 2, 1, [30.0, 10.0]),
    measurement(8, 0, 1, [30.0]),
    measurement(8, 1, 1, [15.0]),
    measurement(8, 2, 1, [30.0]),
    measurement(0, 0, 16, [2.0]),
    measurement(4, 0, 16, [3.0]),
]


def test_rates_are_summarized_by_concurrency_and_draft_length_and_ratios_taken_within_a_round() -> None:
    four, eight, sixteen_users = speed_rows(MEASUREMENTS)
    assert [(one["concurrency"], one["k"]) for one in (four, eight, sixteen_users)] == [
        (1, 4),
        (1, 8),
        (16, 4),
    ]
    assert four["plain"] == eight["plain"] == {"median": 10.0, "lowest": 5.0, "highest": 10.0}
    assert four["drafter"] == {"median": 20.0, "lowest": 10.0, "highest": 22.0}
    assert four["speedup"] == {"median": 2.0, "lowest": 2.0, "highest": 2.2}
    assert eight["speedup"] == pytest.approx({"median": 3.0, "lowest": 3.0, "highest": 3.0})
    assert [one["acceptance_length"] for one in (four, eight)] == [3.0, 5.0]
