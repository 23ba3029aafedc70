"""The order in which two sides are timed, and when their speed-up is not known."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eagle31.decoding.speculative import Decoded
from train.evaluation.decoding import (
    WARM_UP_TOKENS,
    Decode,
    PassResults,
    TimedPrompt,
    decode_in_turns,
    fastest_threads,
    paired_timing,
)

PROMPTS = [[1], [2], [3], [4]]


def recorded(name: str, calls: list[tuple[str, int, int]]) -> Decode:
    """Return a side that records its name, the prompt's first token and the limit of each call."""

    def decode(prompt: Sequence[int], max_new_tokens: int) -> Decoded:
        calls.append((name, prompt[0], max_new_tokens))
        return Decoded([7], [], 0.5)

    return decode


def test_the_sides_take_turns_after_a_warm_up(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    sides = recorded("plain", calls), recorded("drafted", calls)
    pairs = decode_in_turns(PROMPTS, *sides, 20, PassResults(tmp_path))
    assert calls[:2] == [("plain", 1, WARM_UP_TOKENS), ("drafted", 1, WARM_UP_TOKENS)]
    assert [name for name, _, _ in calls[2:]] == ["plain", "drafted", "drafted", "plain"] * 2
    assert [prompt for _, prompt, _ in calls[2:]] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert {limit for _, _, limit in calls[2:]} == {20}
    assert len(pairs) == 4


def test_an_interrupted_evaluation_warms_up_again_and_keeps_its_order(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    sides = recorded("plain", calls), recorded("drafted", calls)
    decode_in_turns(PROMPTS[:3], *sides, 20, PassResults(tmp_path))
    calls.clear()
    decode_in_turns(PROMPTS, *sides, 20, PassResults(tmp_path))
    warm_up = [("plain", 1, WARM_UP_TOKENS), ("drafted", 1, WARM_UP_TOKENS)]
    assert calls == [*warm_up, ("drafted", 4, 20), ("plain", 4, 20)]
    calls.clear()
    decode_in_turns(PROMPTS, *sides, 20, PassResults(tmp_path))
    assert calls == []


def test_both_sides_use_the_threads_with_which_the_target_alone_is_fastest() -> None:
    def plain(prompt: Sequence[int], max_new_tokens: int) -> Decoded:
        return Decoded([7], [], 0.5 if torch.get_num_threads() == 1 else 1.0)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with fastest_threads(plain, [1]):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def timed(*ratios: float) -> list[TimedPrompt]:
    return [TimedPrompt(10, 1.0, 10, ratio) for ratio in ratios]


def test_the_speedup_is_the_median_of_the_prompts_ratios() -> None:
    ratios = (1.5, 1.6, 1.7, 1.8, 1.6, 1.65, 1.7, 9.0)
    found = paired_timing(timed(*ratios), "somehow")
    assert found["speedup"] == pytest.approx(statistics.median(ratios))
    assert found["low"] <= found["speedup"] <= found["high"] < 9.0
    assert found["unknown"] is None
    assert found["tokens_per_second"] == 10.0
    assert found["plain_tokens_per_second"] == pytest.approx(80 / sum(ratios))


@pytest.mark.parametrize(
    ("ratios", "reason"),
    [
        ((0.8, 1.0, 1.2, 1.5, 1.7, 2.0, 2.4, 0.9), "the times vary too much"),
        ((1.5, 1.5, 1.5, 1.5), "4 prompts were timed, and at least 5 are needed"),
    ],
)
def test_a_speedup_that_the_times_do_not_give_is_not_known(ratios: tuple[float, ...], reason: str) -> None:
    found = paired_timing(timed(*ratios), "somehow")
    assert found["speedup"] is None
    assert reason in found["unknown"]
