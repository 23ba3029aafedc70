"""What is counted of what vLLM answers, and what is refused before it is asked."""

from pathlib import Path

import pytest

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
# Drafts of three tokens: the second was accepted past the end of the text; tokens 4 and 5 came without one.
TEXT = list(range(10, 18))
DRAFTS = [PlacedDraft(1, [11, 12, 99], 2), PlacedDraft(6, [16, 17, 18], 3)]


@pytest.fixture
def spec(tmp_path: Path) -> TargetSpec:
    return save_target_with_tokenizer(tmp_path / "target")


def context(spec: TargetSpec, *own: str, rank: int = 0) -> RunContext:
    needed = [f"target.model={spec.model}", "data.train=none.jsonl", "output_dir=none", *own]
    return RunContext(composed("any_target", *needed), World(rank=rank, local_rank=rank, size=2))


def decoded(completions: list[list[int]], drafts: list[list[PlacedDraft]], num_drafts: int) -> DecodedPass:
    return DecodedPass(Served(completions, drafts), Counters(num_drafts, 0, ()), seconds=2.0)


def test_drafts_are_counted_to_the_end_of_the_text() -> None:
    alone = DecodedPass(Served([TEXT]), Counters(0, 0, ()), seconds=5.0)
    numbers = pass_numbers(decoded([TEXT], [DRAFTS], 2), alone, 3)
    assert numbers["accepted_per_position"] == (2, 2, 0)
    assert numbers["num_target_forwards"] == 5  # the prompt, a draft, two tokens alone, a draft
    assert numbers["tokens_per_target_forward"] == 1.6
    assert numbers["speedup"] == pytest.approx(2.5)


def test_forwards_are_the_prompts_where_nothing_is_drafted() -> None:
    assert num_target_forwards(Served([[7], TEXT], [[], []])) == 1 + len(TEXT)


def test_drafts_that_were_not_recorded_are_a_failure() -> None:
    with pytest.raises(EngineFailure, match="2 drafts were recorded and vLLM counts 3"):
        pass_numbers(decoded([TEXT], [DRAFTS], 3), decoded([TEXT], [[]], 0), 3)


def test_texts_part_at_a_near_tie_or_differ() -> None:
    parted = [*TEXT[:3], 77]
    ours = JobResult("a", (decoded([TEXT] * 4, [[]] * 4, 0),), (), 1.0, "0")
    own = decoded([TEXT, parted, parted, TEXT[:3]], [[]] * 4, 0)
    alone = JobResult("b", (own,), (None, 5e-5, 0.5, None), 1.0, "0")
    assert completion_verdicts(ours, alone) == ["identical", "near_tie", "different", "different"]


def test_prompts_without_room_for_answer_and_draft_are_left_out(
    spec: TargetSpec, capsys: pytest.CaptureFixture
) -> None:
    run = context(spec, "evaluate.max_new_tokens=100", "drafter.max_position_embeddings=200")
    run.artifacts[Stage.export] = Artifact("export", {}, Path("export"))
    asked = vllm_evaluation(run)
    room = 100 - draft_room(asked.draft_tokens)
    assert list(map(len, fitting_prompts(asked, [[1] * room, [1] * (room + 1)]))) == [room]
    assert f"1 prompts of more than {room} tokens are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"evaluate\.max_new_tokens=100.*200 positions"):
        fitting_prompts(asked, [[1] * (room + 1)])


def test_the_result_depends_on_the_engine_and_its_arguments(spec: TargetSpec) -> None:
    found = []
    for own in ([], ["vllm.engine_args={quantization: fp8}"], [IN_VLLM]):
        asked = context(spec, *own)
        for stage in (Stage.export, Stage.answers, Stage.capture):
            asked.artifacts[stage] = Artifact(stage.value, {}, Path(stage.value))
        found.append(evaluate_inputs(asked))
    by_hf, with_arguments, in_vllm = found
    assert by_hf == with_arguments
    assert in_vllm == by_hf | {"engine": "vllm", "engine_args": {}}
