"""What each stage's result depends on: a change makes exactly the stages run again that it affects."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from tests.train.drafter.tiny_export import make_published
from tests.train.small_run import RECIPE, arguments
from tests.train.torchrun import composed
from train.artifact import Artifact
from train.config.run import Stage
from train.context import RunContext
from train.distributed import World
from train.drafter.published import validate_export
from train.pipeline import STAGES
from train.stages.training_inputs import fixed_inputs

ALL = set(STAGES)
FROM_ANSWERS = {Stage.answers, Stage.capture, Stage.train, Stage.export, Stage.evaluate}
REGENERATED = "data.regenerate.enabled=true"
OWN = ("data.train=self", REGENERATED)
IN_VLLM = ("target.engine=vllm", "capture.source=vllm")


def _keys(*settings: str) -> dict[Stage, str]:
    context = RunContext(composed(RECIPE, *settings), World(rank=0, local_rank=0, size=1))
    for stage, definition in STAGES.items():
        if stage in ALL:
            inputs = definition.inputs(context)
            context.artifacts[stage] = Artifact.locate(Path("artifacts"), stage.value, inputs)
    return {stage: artifact.key for stage, artifact in context.artifacts.items()}


def _changed(one: dict[Stage, str], other: dict[Stage, str]) -> set[Stage]:
    return {stage for stage in one if one[stage] != other[stage]}


def _changed_in_place(weights: Path) -> None:
    """Change one byte in the middle, and nothing that `ls -l` shows."""
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[len(content) // 2 + 1] ^= 1
    with weights.open("r+b") as file:
        file.write(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def own_target(small_target: EmbeddedTarget, tmp_path: Path) -> EmbeddedTarget:
    """A copy of the small target, whose weights a test may change."""
    return replace(small_target, model=Path(shutil.copytree(small_target.model, tmp_path / "model")))


def test_other_weights_of_the_target_are_another_target(
    own_target: EmbeddedTarget, finished: tuple[Path, str], tmp_path: Path
) -> None:
    settings = arguments(own_target, tmp_path / "run")
    before, regenerated = _keys(*settings), _keys(*settings, REGENERATED)
    own = _keys(*settings, *OWN)
    assert _keys(*settings) == before
    _changed_in_place(own_target.model / "model.safetensors")
    assert _changed(before, _keys(*settings)) == FROM_ANSWERS
    assert _changed(regenerated, _keys(*settings, REGENERATED)) == set(before)
    assert _changed(own, _keys(*settings, *OWN)) == ALL
    with pytest.raises(UserError, match=r"target_fingerprint="):
        validate_export(finished[0] / "export", TargetSpec(str(own_target.model)))


FROM_CAPTURE = FROM_ANSWERS - {Stage.answers}
SETTING_CHANGES: dict[tuple[str, ...], dict[str, set[Stage]]] = {
    (): {
        "target.attn_implementation=eager": FROM_ANSWERS,
        "target.dtype=bfloat16": FROM_ANSWERS,
        "target.trust_remote_code=true": FROM_ANSWERS,
        "target.device_map=auto": set(),
        "data.max_samples=20": ALL - {Stage.answers},
        "data.turns=last": ALL - {Stage.answers},
        "data.num_test=5": ALL,
        "+vllm.engine_args.quantization=fp8": set(),
    },
    IN_VLLM: {
        "+vllm.engine_args.quantization=fp8": FROM_ANSWERS,
        "+vllm.engine_args.dtype=float16": FROM_ANSWERS,
        "+vllm.engine_args.an_argument_of_tomorrow=1": FROM_ANSWERS,
        # Evaluation measures the speed, too.
        "+vllm.engine_args.tensor_parallel_size=2": {Stage.evaluate},
        "+vllm.engine_args.gpu_memory_utilization=0.5": {Stage.evaluate},
        "target.attn_implementation=eager": set(),
    },
    (*IN_VLLM, REGENERATED): {
        "+vllm.engine_args.quantization=fp8": ALL,
        "data.regenerate.batch_size=3": set(),
    },
    # All of the target's tokens.
    ("drafter.draft_vocab_size=null",): {"drafter.draft_vocab_size=1000000": set()},
    (REGENERATED,): {"data.regenerate.batch_size=3": ALL - {Stage.answers}},
    # Held-out prompts are among those that the target writes.
    OWN: {
        "data.self_prompts.num=30": ALL,
        "data.self_prompts.temperature=0.5": ALL,
        "data.self_prompts.top_p=0.5": ALL,
        "data.self_prompts.max_new_tokens=30": ALL,
        "data.self_prompts.system_prompt=brief": ALL,
        "data.regenerate.batch_size=3": ALL,
        "target.attn_implementation=eager": ALL,
        "data.regenerate.temperature=0.5": ALL - {Stage.answers},
    },
    (*IN_VLLM, *OWN): {
        "+vllm.engine_args.quantization=fp8": ALL,
        "data.regenerate.batch_size=3": set(),
    },
    # Only states come from vLLM: the completions are those of transformers.
    ("capture.source=vllm",): {"+vllm.engine_args.quantization=fp8": FROM_CAPTURE},
}


@pytest.mark.parametrize("settings", SETTING_CHANGES, ids=[" ".join(one) for one in SETTING_CHANGES])
def test_settings_of_the_target_and_its_engine(
    small_target: EmbeddedTarget, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    common = [*arguments(small_target, tmp_path), *settings]
    before = _keys(*common)
    for change, expected in SETTING_CHANGES[settings].items():
        assert _changed(before, _keys(*common, change)) == expected, change


def test_a_continued_training_may_be_evaluated_with_longer_drafts(
    small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    fixed = []
    for change in ([], ["evaluate.draft_tokens=2"]):
        config = composed(RECIPE, *arguments(small_target, tmp_path), "train.ttt_steps=3", *change)
        fixed.append(fixed_inputs(config, RunContext(config, World(rank=0, local_rank=0, size=1)).drafter))
    assert fixed[0] == fixed[1]


def test_another_checkpoint_to_start_from_is_trained_again(
    small_target: EmbeddedTarget, finished: tuple[Path, str], tmp_path: Path
) -> None:
    start = Path(shutil.copytree(finished[0] / "export", tmp_path / "start"))
    make_published(start)
    settings = [*arguments(small_target, tmp_path / "run"), f"drafter.init_from={start}"]
    before = _keys(*settings)
    _changed_in_place(start / "model.safetensors")
    assert _changed(before, _keys(*settings)) == {Stage.vocab, Stage.train, Stage.export, Stage.evaluate}


def test_other_conversations_are_other_data(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    source = Path(shutil.copy(small_target.train, tmp_path / "train.jsonl"))
    settings = [*arguments(small_target, tmp_path / "run"), f"data.train={source}"]
    before = _keys(*settings)
    source.write_text(source.read_text().replace("return", "yield!", 1))
    assert _changed(before, _keys(*settings)) == ALL
