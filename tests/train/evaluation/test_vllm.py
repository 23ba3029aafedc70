"""Numbers from vLLM's completions, and the prompts that are left out."""

from pathlib import Path

import pytest
import torch

from data.target.spec import TargetSpec
from eagle31.errors import UserError
from tests.train.drafter.tiny_export import save_target_with_tokenizer
from tests.train.torchrun import composed
from train.artifact import Artifact
from train.config.run import Stage
from train.context import RunContext
from train.distributed import World
from train.evaluation.vllm import completion_verdicts, fitting_prompts, num_target_forwards, pass_numbers
from train.serving.drafts import PlacedDraft, Served
from train.serving.engine import Counters, DecodedPass, EngineFailure, JobResult, draft_room
from train.stages.evaluate import evaluate_inputs, vllm_evaluation

IN_VLLM = "target.engine=vllm"
# Drafts of three tokens: the second was accepted past the end; tokens 4 and 5 were written without a draft.
COMPLETION = list(range(10, 18))
DRAFTS = [PlacedDraft(1, [11, 12, 99], 2), PlacedDraft(6, [16, 17, 18], 3)]


@pytest.fixture
def spec(tmp_path: Path) -> TargetSpec:
    return save_target_with_tokenizer(tmp_path / "target")


def context(spec: TargetSpec, *overrides: str, rank: int = 0) -> RunContext:
    needed = [f"target.model={spec.model}", "data.train=none.jsonl", "output_dir=none", *overrides]
    return RunContext(composed("any_target", *needed), World(rank=rank, local_rank=rank, size=2))


def decoded(completions: list[list[int]], drafts: list[list[PlacedDraft]], num_drafts: int) -> DecodedPass:
    return DecodedPass(Served(completions, drafts), Counters(num_drafts, 0, ()), seconds=2.0)


def test_drafts_are_counted_to_the_end_of_the_completion() -> None:
    plain = DecodedPass(Served([COMPLETION]), Counters(0, 0, ()), seconds=5.0)
    numbers = pass_numbers(decoded([COMPLETION], [DRAFTS], 2), plain, 3)
    assert numbers["accepted_per_position"] == (2, 2, 0)
    assert numbers["num_target_forwards"] == 5  # the prompt, a draft, two tokens without a draft, a draft
    assert numbers["tokens_per_target_forward"] == 1.6
    assert numbers["speedup"] == pytest.approx(2.5)


def test_each_token_is_a_forward_pass_without_drafts() -> None:
    assert num_target_forwards(Served([[7], COMPLETION], [[], []])) == 1 + len(COMPLETION)


def test_unrecorded_drafts_raise() -> None:
    with pytest.raises(EngineFailure, match="2 drafts were recorded and vLLM counts 3"):
        pass_numbers(decoded([COMPLETION], [DRAFTS], 3), decoded([COMPLETION], [[]], 0), 3)


def test_completions_are_identical_near_ties_or_different() -> None:
    parted = [*COMPLETION[:3], 77]
    drafted = JobResult("a", (decoded([COMPLETION] * 4, [[]] * 4, 0),), (), 1.0, "0")
    completions = decoded([COMPLETION, parted, parted, COMPLETION[:3]], [[]] * 4, 0)
    plain = JobResult("b", (completions,), (None, (0.2, 8.0), (0.5, 8.0), None), 1.0, "0")
    verdicts = completion_verdicts(drafted, plain, torch.bfloat16)
    assert verdicts == ["identical", "near_tie", "different", "different"]
    # In float32 rounding decides between much closer logits only.
    assert completion_verdicts(drafted, plain, torch.float32)[1] == "different"


def test_prompts_without_room_for_completion_and_draft_are_left_out(
    spec: TargetSpec, capsys: pytest.CaptureFixture
) -> None:
    run = context(spec, "evaluate.max_new_tokens=100", "drafter.max_position_embeddings=200")
    run.artifacts[Stage.export] = Artifact("export", {}, Path("export"))
    settings = vllm_evaluation(run, Path("passes"))
    room = 100 - draft_room(settings.draft_tokens)
    assert list(map(len, fitting_prompts(settings, [[1] * room, [1] * (room + 1)]))) == [room]
    assert f"1 prompts of more than {room} tokens are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"evaluate\.max_new_tokens=100.*200 positions"):
        fitting_prompts(settings, [[1] * (room + 1)])


def test_the_result_depends_on_the_engine_and_its_arguments(spec: TargetSpec) -> None:
    found = []
    for overrides in ([], ["vllm.engine_args={quantization: fp8}"], [IN_VLLM]):
        run = context(spec, *overrides)
        for stage in (Stage.export, Stage.answers, Stage.capture):
            run.artifacts[stage] = Artifact(stage.value, {}, Path(stage.value))
        found.append(evaluate_inputs(run))
    by_hf, with_arguments, in_vllm = found
    assert by_hf == with_arguments
    assert in_vllm == by_hf | {"engine": "vllm", "engine_args": {}}
