"""Numbers from vLLM's completions, and the prompts that are left out."""

from dataclasses import replace

import pytest

from eagle31.errors import UserError
from train.evaluation.measure import Conditions
from train.evaluation.serving import (
    Counters,
    EngineFailure,
    JobResult,
    PlacedDraft,
    Served,
    acceptance,
    draft_room,
)
from train.evaluation.vllm import check_recorded, fitting_prompts

# Drafts of three tokens: the second was accepted past the end, so that it does not count.
COMPLETION = list(range(10, 18))
DRAFTS = [PlacedDraft(1, [11, 12, 99], 2), PlacedDraft(6, [16, 17, 18], 3)]


def test_drafts_count_that_end_within_the_completion() -> None:
    drafts = [*DRAFTS, PlacedDraft(5, [15, 16, 17], 3)]
    stats = acceptance(3, [drafts, [PlacedDraft(1, [4, 5, 6], 3)]], [COMPLETION, [3, 4, 5]])
    assert (stats.num_drafts, stats.accepted_per_position) == (2, (2, 2, 1))


def test_drafts_that_are_not_those_of_the_counters_raise() -> None:
    right = JobResult(Served([COMPLETION], [DRAFTS]), Counters(2, 5, (2, 2, 1)), "V1", "0")
    check_recorded(right, 3)
    for counters in (Counters(1, 5, (2, 2, 1)), Counters(2, 4, (2, 2, 0))):
        with pytest.raises(EngineFailure, match="not those that vLLM counts"):
            check_recorded(replace(right, counters=counters), 3)


def test_prompts_without_room_for_completion_and_draft_are_left_out(capsys: pytest.CaptureFixture) -> None:
    conditions, room = Conditions(4, 100, (0,), 0), 100 - draft_room(4)
    assert fitting_prompts([[1] * (room + 1), [1] * room], 200, conditions) == [1]
    assert f"1 prompts of more than {room} tokens are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"evaluate\.max_new_tokens=100.*200 positions"):
        fitting_prompts([[1] * (room + 1)], 200, conditions)
