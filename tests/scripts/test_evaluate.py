import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from data.capture import hf
from data.generation.hf import TransformersGenerator
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from eagle31.export.layouts import Layout
from tests.data.conversations import chat_templates as templates
from tests.data.target.tiny_target import HIDDEN_SIZE, save_model
from tests.train.drafter.tiny_export import write_tiny_export
from tests.train.small_run import assert_agreement
from train.evaluation.checkpoint import (
    CheckpointEvaluation,
    evaluate_checkpoint,
    of_all_sources,
)
from train.evaluation.matrix import format_matrix, parse_sources, prompt_source, settings_of
from train.report.results import format_results

VOCAB_SIZE = 512  # room for the tokenizer


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> CheckpointEvaluation:
    root = tmp_path_factory.mktemp("evaluate")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=VOCAB_SIZE - 1,
    )
    torch.manual_seed(0)
    save_model(LlamaForCausalLM(config), root / "target")
    templates.byte_level_tokenizer(templates.CHATML).save_pretrained(root / "target")
    spec = TargetSpec(str(root / "target"))
    write_tiny_export(root / "export", spec, vocab_size=VOCAB_SIZE, layout=Layout.speculators)
    rows = [{"q": f"what is {n}", "a": "six"} for n in ("one", "two", "three", "four")]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return CheckpointEvaluation(
        checkpoint=str(root / "export"),
        target=spec.model,
        data=[str(root / "data.jsonl")],
        num_prompts=3,
        draft_tokens=2,
        max_new_tokens=8,
        prompt_column="q",
    )


def test_measures_a_checkpoint(asked: CheckpointEvaluation) -> None:
    result = evaluate_checkpoint(replace(asked, temperature=1.0, decoded_prompts=2))
    assert_agreement(result)
    assert result["num_prompts"] == 3
    assert result["decoding"]["num_prompts"] == 2
    assert [row["k"] for row in result["trained"]["by_draft_length"]] == list(range(1, 8))
    assert result["trained"]["by_draft_length"][1]["num_drafts"] >= 3
    assert result["aux_layer_ids"] == [0, 2, 5]
    printed = format_results(result)
    head, *rows = (line.split() for line in printed.splitlines()[:4])
    assert head[:4] == ["drafter", "drafts", "k", "temperature"]
    assert [row[1:4] for row in rows] == [["greedy", "2", "0"], ["greedy", "2", "1"], ["sampled", "2", "1"]]
    assert "2 of them decoded by eagle31 (transformers, float32, cpu)" in printed


def test_several_sources_are_measured_together_and_each(asked: CheckpointEvaluation, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text("\n".join(json.dumps({"q": f"how is {n}"}) for n in ("red", "blue")))
    result = evaluate_checkpoint(replace(asked, data=[*asked.data, str(tmp_path / "more.jsonl")]))
    assert [(one["name"], one["num_prompts"]) for one in result["cells"]] == [("data", 3), ("more", 2)]
    apart = [cell["by_draft_length"][1]["num_drafts"] for cell in result["cells"]]
    assert sum(apart) == result["trained"]["by_draft_length"][1]["num_drafts"]
    assert [line.split()[:2] for line in format_matrix(result).splitlines()[1:]] == [
        ["data", "3"],
        ["more", "2"],
    ]


def test_other_weights_than_those_of_the_training_are_noted(
    asked: CheckpointEvaluation, tmp_path: Path
) -> None:
    assert evaluate_checkpoint(asked)["notes"] == []
    shutil.copytree(asked.target, tmp_path / "tuned")
    weights = load_file(tmp_path / "tuned" / "model.safetensors")
    weights["model.norm.weight"] *= 1.1
    save_file(weights, tmp_path / "tuned" / "model.safetensors", metadata={"format": "pt"})
    [note] = evaluate_checkpoint(replace(asked, target=str(tmp_path / "tuned")))["notes"]
    assert note.startswith("the drafter was trained for other weights: target_fingerprint=")


def test_the_prompts_that_are_decoded_are_of_all_sources() -> None:
    assert of_all_sources(["a", "a", "a", "b", "c", "c"]) == [0, 3, 4, 1, 5, 2]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"checkpoint": "./nothing/here"}, "checkpoint"),
        ({"draft_tokens": 0}, "--draft-tokens"),
        ({"draft_tokens": 8}, "--draft-tokens"),  # as many as --max-new-tokens
        ({"temperature": -1.0}, "--temperature"),
        ({"aux_layer_ids": [1, 2]}, "eagle_aux_hidden_state_layer_ids"),
        ({"aux_layer_ids": [1, 2, 9]}, "drafter.aux_layer_ids"),
        ({"prompt_column": "missing"}, "--data"),
    ],
)
def test_bad_input_is_refused_before_the_target_is_loaded(
    asked: CheckpointEvaluation, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr(hf, "load_target", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(UserError) as raised:
        evaluate_checkpoint(replace(asked, **changes))
    assert raised.value.field == field


def test_matrix(asked: CheckpointEvaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"q": f"how is {n}"} for n in ("red", "blue")]
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "sets.yaml").write_text(f"other: {{source: {tmp_path / 'other.jsonl'}, prompt_column: q}}")
    settings = replace(
        asked,
        data=[*asked.data, str(tmp_path / "sets.yaml")],
        max_new_tokens=4,
        output=tmp_path / "kept",
    )
    conditions = settings_of(["plain"], ["short"], [60])
    result = evaluate_checkpoint(settings, conditions)
    names = [
        f"{domain}{suffix}" for domain in ("data", "other") for suffix in ("", "/plain", "/system_short")
    ]
    assert [cell["name"] for cell in result["cells"]] == names
    assert [cell["num_prompts"] for cell in result["cells"]] == [3, 3, 3, 2, 2, 2]
    left_out = [note.split(": ")[:2] for note in result["notes"]]
    assert left_out == [["left out", "data/context_60"], ["left out", "other/context_60"]]
    assert [cell["ratio"] is None for cell in result["cells"]] == [True, False, False] * 2
    for cell in result["cells"][1:3]:
        lengths = [one["by_draft_length"][1]["acceptance_length"] for one in (cell, result["cells"][0])]
        assert cell["ratio"]["value"] == pytest.approx(lengths[0] / lengths[1])
    assert f"{names[1]} " in format_matrix(result)
    # The completions are kept, so that the target writes none again.
    monkeypatch.setattr(TransformersGenerator, "submit", lambda _, group, *__: pytest.fail(group))
    assert evaluate_checkpoint(settings, conditions) == result


def test_matrix_refuses_what_cannot_be_measured(asked: CheckpointEvaluation, tmp_path: Path) -> None:
    for given, field in (
        (lambda: settings_of(["nothing"], [], []), "--matrix.template"),
        (lambda: parse_sources(["a/b.jsonl", "b=x.jsonl"], prompt_source("--data")), "--data"),
        (lambda: parse_sources(["nothing.yaml"], prompt_source("--data")), "--data"),
        (
            lambda: evaluate_checkpoint(replace(asked, max_new_tokens=10**6)),
            "--data",
        ),
    ):
        with pytest.raises(UserError) as raised:
            given()
        assert raised.value.field == field
    (tmp_path / "wrong.yaml").write_text("a: {sauce: b}")
    with pytest.raises(UserError, match="no list of sources"):
        parse_sources([str(tmp_path / "wrong.yaml")], prompt_source("--data"))
