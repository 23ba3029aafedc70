"""Drafts by the target's own MTP head: a small random MiMo in vLLM, and what evaluation makes of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.data.capture.vllm.targets import COMMON, KV_CACHE_BYTES, VOCAB_SIZE
from tests.train.torchrun import composed
from train.context import RunContext
from train.distributed import World
from train.evaluation import vllm as vllm_evaluation
from train.evaluation.measure import Conditions, without_vllm
from train.evaluation.serving import (
    DecodeJob,
    JobResult,
    PlacedDraft,
    Served,
    run_job,
)
from train.evaluation.vllm import decode_with_mtp_head

CONDITIONS = Conditions(draft_tokens=4, max_new_tokens=40, eos_token_ids=(2,))


def save_mimo(directory: Path) -> Path:
    """Save a random MiMo, which is a Qwen2 with an MTP head, and which transformers loads without it.

    The target's layers write little into the state, so that the next token depends mostly on the last one.
    The head reads that token alone, so that some of its drafts are right.
    """
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
    sizes = COMMON | sizes | {"num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.1, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter *= 0.1
    model.save_pretrained(directory)
    tensors, size = load_file(directory / "model.safetensors"), COMMON["hidden_size"]
    head = {name.removeprefix("model.layers.0."): value.clone() for name, value in tensors.items()}
    head = {name: value for name, value in head.items() if not name.startswith(("model.", "lm_head."))}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        head[f"{name}.weight"] = torch.ones(size)
    head["input_proj.weight"] = torch.cat([torch.zeros(size, size), 0.1 * torch.eye(size)], dim=1)
    tensors |= {f"model.mtp_layers.0.{name}": value for name, value in head.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = directory / "config.json"
    published = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | published))
    return directory


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    settings = (f"target.model={save_mimo(tmp_path / 'mimo')}", "data.train=x", "target.engine=vllm")
    memory = f"vllm.engine_args.kv_cache_memory_bytes={KV_CACHE_BYTES}"
    config = composed("any_target", *settings, memory, f"output_dir={tmp_path / 'run'}")
    return RunContext(config, World(rank=0, local_rank=0, size=1))


@pytest.mark.full("two engines of vLLM")
@pytest.mark.timeout(600)
def test_vllm_drafts_with_the_head_and_writes_what_the_target_does(
    context: RunContext, vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(vllm_python))
    results: list[JobResult] = []

    def and_alone(job: DecodeJob, python: Path, log: Path) -> JobResult:
        assert job.engine.arguments()["speculative_config"]["method"] == "mtp"
        alone = replace(job, name="alone", engine=replace(job.engine, mtp=False))
        results.extend(run_job(one, python, log) for one in (job, alone))
        return results[0]

    monkeypatch.setattr(vllm_evaluation, "run_job", and_alone)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 9, 17, 30, 12, 8)
    ]
    found = decode_with_mtp_head(context, prompts, CONDITIONS)
    drafted, alone = results
    assert drafted.served.completions == alone.served.completions
    assert drafted.counters["num_accepted"] > 20  # and vLLM's counters are those of the recorded drafts
    # Each prompt's drafts that end within its completion, in which accepted tokens are what was written.
    counts = [
        [
            next((i for i in range(4) if draft.token_ids[i] != text[draft.position + i]), 4)
            for draft in drafts
            if draft.position + 4 <= len(text)
        ]
        for drafts, text in zip(drafted.served.drafts, alone.served.completions, strict=True)
    ]
    assert found["by_prompt"] == {"drafts": [list(map(len, counts))], "accepted": [list(map(sum, counts))]}
    [row] = found["by_draft_length"]
    assert row["acceptance_length"] == pytest.approx(1 + sum(map(sum, counts)) / sum(map(len, counts)))
    assert 1 < row["low"] < row["acceptance_length"] < row["high"] < 5


def test_the_head_is_compared_by_prompt(
    context: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculative: list[dict[str, Any]] = []

    def drafted(job: DecodeJob, *_: object) -> JobResult:
        speculative.append(job.engine.arguments()["speculative_config"])
        drafts = [[PlacedDraft(1, [3, 4, 5, 6], 2)], [PlacedDraft(1, [3, 4, 5, 6], 0)]]
        counters = {"num_drafts": 2, "num_accepted": 2, "accepted_per_position": [1, 1, 0, 0]}
        served = Served([[9] * 8, [9] * 4], drafts)
        return JobResult(served, counters, "V1", "0.32.0")

    monkeypatch.setattr(vllm_evaluation, "run_job", drafted)
    monkeypatch.setattr(vllm_evaluation, "find_python", lambda: tmp_path)
    found = decode_with_mtp_head(context, [[4, 5], [6]], CONDITIONS)
    assert found["by_prompt"] == {
        "drafts": [[1, 0]],
        "accepted": [[2, 0]],
    }  # the second is too short for four
    assert found["by_draft_length"][0]["acceptance_length"] == 3
    assert [(one["method"], one["num_speculative_tokens"], "model" in one) for one in speculative] == [
        ("mtp", 4, False)
    ]


def test_a_head_that_vllm_does_not_serve_is_missing_with_the_reason(
    context: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "NotImplementedError: Unsupported speculative method: 'mtp'"
    failed = {"error": error, "traceback": "  File speculative.py"}
    monkeypatch.setattr("train.evaluation.serving.run_worker", lambda *_: [failed])
    monkeypatch.setattr(vllm_evaluation, "find_python", lambda: tmp_path)
    found = decode_with_mtp_head(context, [[4, 5]], CONDITIONS)
    assert found == {"missing": f"not measured: vLLM failed (the target's own MTP head): {error}"}


def test_transformers_does_not_draft_with_a_head(context: RunContext) -> None:
    parts = context.target.parts
    assert parts.has_mtp_head
    assert "target.engine=vllm" in str(without_vllm(parts))
    assert without_vllm(replace(parts, has_mtp_head=False)) is None
