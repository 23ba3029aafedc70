"""The verdict on counts and differences of both sides."""

import json
import math
from dataclasses import replace

import pytest
import torch

from eagle31.decoding.acceptance import AcceptanceStats
from train.evaluation.agreement import Agreement, Difference
from train.evaluation.parity import Comparison, comparison_lines

NUM_PROMPTS = 8
# Of 62 or 63 drafts of each prompt, 60 of all 500 are accepted up to the fourth position.
STATS = AcceptanceStats(4, 62.5, (40.0, 25.0, 12.5, 7.5))
NEAR, FAR = (Difference("drafted", 4, [1, 2, 3], [1, 2, 4], gap=gap, bound=1e-3) for gap in (1e-4, 1.0))


def comparison(
    drafts: list[Difference],
    tokens: list[Difference],
    dtype: torch.dtype = torch.float32,
    num_compared: int = 400,
) -> Comparison:
    return Comparison(
        k=4,
        by_prompt=[(STATS, STATS)] * NUM_PROMPTS,
        agreement=Agreement(
            num_drafts=num_compared,
            num_compared=num_compared,
            drafts=[(0, one) for one in drafts],
            num_tokens=800,
            tokens=[(0, one) for one in tokens],
            completions={},
        ),
        dtype=dtype,
    )


def test_equal_sides_pass() -> None:
    assert comparison([], []).passed
    assert "vLLM serves what was trained (0.5%" in comparison_lines(comparison([], []))[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_difference_that_rounding_does_not_explain_fails(dtype: torch.dtype) -> None:
    assert comparison([FAR], [], dtype).failures == ["1 drafts differ"]
    assert comparison([], [FAR], dtype).failures == ["1 tokens of the completions differ"]
    assert "position 4: drafted: eagle31 [1, 2, 3], engine [1, 2, 4]" in "\n".join(
        comparison_lines(comparison([FAR], [], dtype))
    )


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2), (torch.bfloat16, 100)])
def test_few_near_ties_are_tolerated(dtype: torch.dtype, allowed: int) -> None:
    assert comparison([NEAR] * allowed, [NEAR] * allowed, dtype).passed
    [failure] = comparison([NEAR] * (allowed + 1), [], dtype).failures
    assert failure == f"{allowed + 1} drafts differ by near-ties; {allowed} may"


def test_nothing_compared_fails() -> None:
    assert comparison([], [], num_compared=0).failures == ["vLLM drafted nothing"]
    assert not comparison([], [], num_compared=0).passed


def test_of_a_quantized_target_the_acceptance_lengths_are_judged() -> None:
    drafts = replace(comparison([FAR], []), quantized=True)
    assert drafts.passed
    assert "drafts are not judged" in comparison_lines(drafts)[-1]
    shorter = AcceptanceStats(4, 62.5, (32.0, 25.0, 12.5, 7.5))
    [first, second] = replace(drafts, by_prompt=[(STATS, shorter)] * NUM_PROMPTS).failures
    assert first == "acceptance lengths differ by 5.4%"
    assert second.startswith("acceptance at position 1 is 0.80x")
    assert replace(comparison([], [], num_compared=0), quantized=True).failures == ["vLLM drafted nothing"]


def test_of_a_quantized_target_drafts_that_all_pass_the_completions_end_show_nothing() -> None:
    none = AcceptanceStats.from_lengths(4, [])
    short = replace(comparison([], []), quantized=True, by_prompt=[(none, none)] * NUM_PROMPTS)
    [failure] = short.failures
    assert failure.startswith("no draft of 4 tokens is within a completion")


def test_the_numbers_are_json_also_where_a_token_has_no_logit() -> None:
    outside = replace(FAR, gap=math.inf)
    [found] = comparison([outside], []).to_json()["differing"]
    assert json.loads(json.dumps(found, allow_nan=False))["gap"] is None


def test_of_a_quantized_target_acceptance_at_each_position_is_judged_by_prompt() -> None:
    """A last position that falls from 60 to 12 of 500 drafts shortens acceptance by 3.6 % only."""
    fallen = [replace(STATS, accepted_per_position=(40.0, 25.0, 12.5, one)) for one in (1.0, 2.0)]
    quantized = replace(comparison([], []), quantized=True)
    [failure] = replace(quantized, by_prompt=[(STATS, one) for one in fallen] * 4).failures
    assert failure.startswith("acceptance at position 4 is 0.20x")
    # What falls for some prompts rises for others.
    chance = [replace(STATS, accepted_per_position=(40.0, 25.0, 12.5, one)) for one in (4.0, 10.0)]
    assert replace(quantized, by_prompt=[(STATS, one) for one in chance] * 4).passed
