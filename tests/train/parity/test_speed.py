from dataclasses import asdict

import pytest

from eagle31.errors import UserError
from train.parity.speed import (
    CPU_TIME,
    WALL_TIME,
    Spread,
    acceptance_lengths,
    check_clock,
    speed_lines,
    step_times,
    summarize,
)


def measurement(k: int, round_index: int, concurrency: int, rates: list[float], **known: object) -> dict:
    return {
        "k": k,
        "round": round_index,
        "concurrency": concurrency,
        "num_tokens": 100,
        "seconds": 100 / (sum(rates) / len(rates) * concurrency),
        "request_rates": rates,
        "num_forwards": 40,
        "num_decoded": 40 * (1 + k // 2),
        "step_seconds": 0.010 + 0.002 * k,
        "draft_seconds": 0.001 * k if k else None,
    } | known


# In round 1 the machine was half as fast, which leaves the ratio unchanged.
MEASUREMENTS = [
    measurement(4, 1, 1, [10.0, 10.0]),
    measurement(0, 1, 1, [5.0, 5.0]),
    measurement(0, 0, 1, [10.0, 10.0]),
    measurement(4, 0, 1, [20.0, 24.0]),
    measurement(0, 2, 1, [11.0, 9.0]),
    measurement(4, 2, 1, [30.0, 10.0]),
    measurement(0, 0, 16, [2.0]),
    measurement(4, 0, 16, [3.0]),
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
        "clock": CPU_TIME,
        "ignore_eos": False,
        "max_new_tokens": 64,
        "rounds": 3,
        "rows": [asdict(row) | {"acceptance_length": 1.887} for row in summarize(MEASUREMENTS)],
    }
    text = "\n".join(speed_lines(numbers))
    assert "1 4 10.0 (5.0-10.0) 20.0 (10.0-22.0) 2.00x (2.00-2.20)" in " ".join(text.split())
    for condition in ("vLLM 0.32.0", "x86_64 CPU", "CPU time", "1.89", "median of 3 rounds"):
        assert condition in text


def test_each_draft_length_is_compared_with_the_same_plain_rounds() -> None:
    measured = [measurement(k, i, 2, [10.0 + k * (i + 1)]) for k in (0, 2, 6) for i in range(2)]
    two, six = summarize(measured)
    assert (two.k, six.k) == (2, 6)
    assert two.plain == six.plain == Spread(10.0, 10.0, 10.0)
    assert asdict(six.speedup) == pytest.approx({"median": 1.9, "lowest": 1.6, "highest": 2.2})
    assert acceptance_lengths(measured) == {2: 2.0, 6: 4.0}


def test_steps_are_in_milliseconds_by_round_and_drafting_where_it_is_known() -> None:
    measured = [measurement(k, i, c, [1.0]) for k in (4, 0, 2) for i in range(2) for c in (8, 1)]
    # Here the completions were too short for all users to decode at the same time.
    measured += [measurement(k, 0, 16, [1.0], step_seconds=None) for k in (0, 2, 4)]
    one, eight = step_times(measured)
    assert (one.concurrency, eight.concurrency) == (1, 8)
    assert one.plain == pytest.approx((10, 10))
    assert one.steps[4] == pytest.approx((18, 18))
    assert one.drafting[2] == pytest.approx((2, 2))
    elsewhere = [one | {"draft_seconds": None} for one in measured]
    assert step_times(elsewhere)[0].drafting == {}


def test_cpu_time_is_for_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    check_clock(WALL_TIME, on_cpu=False)
    with pytest.raises(UserError, match="VLLM_CPU_OMP_THREADS_BIND=0"):
        check_clock(CPU_TIME, on_cpu=True)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "1")
    check_clock(CPU_TIME, on_cpu=True)
    with pytest.raises(UserError, match="on a GPU"):
        check_clock(CPU_TIME, on_cpu=False)
