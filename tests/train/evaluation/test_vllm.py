"""Numbers from vLLM's completions, and the prompts that are left out."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from eagle31.errors import UserError
from train.evaluation.measure import Conditions
from train.evaluation.serving import (
    EngineFailure,
    JobResult,
    PlacedDraft,
    Served,
    draft_room,
)
from train.evaluation.vllm import fitting_prompts

# Drafts of three tokens: the second was accepted past the end, so that it does not count.
COMPLETION = list(range(10, 18))
DRAFTS = [PlacedDraft(1, [11, 12, 99], 2), PlacedDraft(6, [16, 17, 18], 3)]


def test_drafts_count_that_end_within_the_completion() -> None:
    drafts = [*DRAFTS, PlacedDraft(5, [15, 16, 17], 3)]
    served = Served([COMPLETION, [3, 4, 5]], [drafts, [PlacedDraft(1, [4, 5, 6], 3)]])
    first, second = served.acceptance(3)
    assert (first.num_drafts, first.accepted_per_position) == (2, (2, 2, 1))
    assert second.num_drafts == 0


def counted(num_drafts: int, accepted: list[int]) -> dict[str, Any]:
    return {"num_drafts": num_drafts, "num_accepted": sum(accepted), "accepted_per_position": accepted}


def test_drafts_that_are_not_those_of_the_counters_raise() -> None:
    right = {"completions": [COMPLETION], "drafts": [[asdict(one) for one in DRAFTS]]}
    right |= {"counters": counted(2, [2, 2, 1]), "model_runner": "V1", "vllm_version": "0"}
    within = [DRAFTS[0], replace(DRAFTS[1], num_accepted=2)]
    assert JobResult.from_json(right).served == Served([COMPLETION], [within])
    for counters in (counted(1, [2, 2, 1]), counted(2, [2, 2, 0])):
        with pytest.raises(EngineFailure, match="not those that vLLM counts"):
            JobResult.from_json(right | {"counters": counters})


def test_prompts_without_room_for_completion_and_draft_are_left_out(capsys: pytest.CaptureFixture) -> None:
    conditions, room = Conditions(4, 100, (0,)), 100 - draft_room(4)
    assert fitting_prompts([[1] * (room + 1), [1] * room], 200, conditions) == [1]
    assert f"1 prompts of more than {room} tokens are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"evaluate\.max_new_tokens=100.*200 positions"):
        fitting_prompts([[1] * (room + 1)], 200, conditions)
