from dataclasses import asdict

import pytest

from train.parity.speed import Spread, speed_lines, summarize


def measurement(side: str, round_index: int, concurrency: int, rates: list[float]) -> dict:
    return {
        "side": side,
        "round": round_index,
        "concurrency": concurrency,
        "num_tokens": 100,
        "seconds": 100 / (sum(rates) / len(rates) * concurrency),
        "request_rates": rates,
    }


# In round 1 the machine was half as fast, which leaves the ratio unchanged.
MEASUREMENTS = [
    measurement("drafter", 1, 1, [10.0, 10.0]),
    measurement("plain", 1, 1, [5.0, 5.0]),
    measurement("plain", 0, 1, [10.0, 10.0]),
    measurement("drafter", 0, 1, [20.0, 24.0]),
    measurement("plain", 2, 1, [11.0, 9.0]),
    measurement("drafter", 2, 1, [30.0, 10.0]),
    measurement("plain", 0, 16, [2.0]),
    measurement("drafter", 0, 16, [3.0]),
]


def test_rates_are_summarized_by_concurrency_and_ratios_taken_within_a_round() -> None:
    one, sixteen = summarize(MEASUREMENTS)
    assert (one.concurrency, sixteen.concurrency) == (1, 16)
    assert one.plain == Spread(10.0, 5.0, 10.0)
    assert one.drafter == Spread(20.0, 10.0, 22.0)
    assert one.speedup == Spread(2.0, 2.0, 2.2)
    assert sixteen.speedup == Spread(1.5, 1.5, 1.5)
    assert sixteen.plain_total.median == pytest.approx(32.0)


def test_table_states_its_conditions() -> None:
    numbers = {
        "engine": "vLLM 0.32.0",
        "dtype": "float32",
        "device": "x86_64 CPU, 2 cores",
        "k": 4,
        "ignore_eos": False,
        "max_new_tokens": 64,
        "acceptance_length": 1.887,
        "rounds": 3,
        "rows": [asdict(row) for row in summarize(MEASUREMENTS)],
    }
    text = "\n".join(speed_lines(numbers))
    assert "1 10.0 (5.0-10.0) 20.0 (10.0-22.0) 2.00x (2.00-2.20)" in " ".join(text.split())
    for condition in ("vLLM 0.32.0", "x86_64 CPU", "k = 4", "acceptance length 1.89", "median of 3 rounds"):
        assert condition in text
