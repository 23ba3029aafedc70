"""The data stage with a limit of samples: what is tokenized, and what is chosen of it."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data.capture.tokens import tokens_fingerprint
from data.conversations.prompts import render_prompt
from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from eagle31.json_files import read_json, read_jsonl
from tests.train.small_run import RECIPE, arguments
from tests.train.stages.making import run_stage_alone
from train.config.run import Stage
from train.stages import data as data_stage
from train.stages.states import training_samples

LIMIT = 50


def _chosen(target: EmbeddedTarget, directory: Path, *settings: str) -> tuple[dict, list[dict]]:
    """Run the data stage; return its summary and the training samples."""
    limit = f"data.max_samples={LIMIT}"
    given = [*arguments(target, directory), limit, "data.max_tokens=100", *settings]
    context = run_stage_alone(Stage.data, RECIPE, *given)
    summary = context.artifacts[Stage.data].summary
    samples = training_samples(context.artifacts[Stage.data])
    assert summary["tokens_fingerprint"] == tokens_fingerprint(samples)
    counts = [len(samples), sum(map(len, samples["input_ids"])), sum(map(sum, samples["loss_mask"]))]
    assert [summary[f"num_{name}"] for name in ("samples", "tokens", "supervised_tokens")] == counts
    return summary, samples.to_list()


def test_a_limit_chooses_conversations_before_they_are_tokenized(
    small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, of_all = _chosen(small_target, tmp_path / "every")
    assert every["num_conversations"] > 2 * 64
    monkeypatch.setattr(data_stage, "COUNTED_CONVERSATIONS", 70)
    few, of_few = _chosen(small_target, tmp_path / "few")
    assert few["num_conversations"] == 128  # two chunks
    assert few["num_conversations_read"] == every["num_conversations_read"]
    monkeypatch.setattr(data_stage, "_FEW_CONVERSATIONS", 0)  # as many processes as cores
    two, of_two = _chosen(small_target, tmp_path / "two")
    assert (two, of_two) == (few, of_few)
    _, other_seed = _chosen(small_target, tmp_path / "seed", "seed=1")
    assert len(of_all) == len(of_few) == len(other_seed) == LIMIT
    ids = [{row["id"] for row in rows} for rows in (of_all, of_few, other_seed)]
    assert ids[0] != ids[1] != ids[2]


def test_the_target_writes_the_prompts_and_their_answers(
    small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["data.train=self", "data.regenerate.enabled=true", "data.regenerate.max_new_tokens=16"]
    settings += ["data.self_prompts.num=64", "data.self_prompts.max_new_tokens=60"]
    with monkeypatch.context() as patched:
        patched.setattr(data_stage, "mix", killed)
        with pytest.raises(KeyboardInterrupt):
            _chosen(small_target, tmp_path, *settings)
    [path] = tmp_path.glob("artifacts/data-*/self_prompts.jsonl")
    written = path.stat().st_mtime_ns
    summary, rows = _chosen(small_target, tmp_path, *settings)
    assert path.stat().st_mtime_ns == written
    prompts = {row["id"]: row["messages"] for row in read_jsonl(path)}
    assert summary["num_conversations_read"] == len(prompts) > 20
    assert all([message["role"] for message in messages] == ["user"] for messages in prompts.values())
    held_out = read_json(path.with_name("held_out.json"))
    others = {row["id"] for name in ("validation", "test") for row in held_out[name]}
    assert len(others) == 14
    tokenizer = AutoTokenizer.from_pretrained(small_target.model)
    trained = {row["id"].partition("/")[0]: row for row in rows}
    assert trained.keys() <= prompts.keys() - others
    assert len(trained) > 5
    for id, row in trained.items():
        ids = tokenizer.apply_chat_template(prompts[id], add_generation_prompt=True)["input_ids"]
        assert row["input_ids"][: row["num_prompt_tokens"]] == ids
        assert not any(row["loss_mask"][: len(ids)])
        assert all(row["loss_mask"][len(ids) :])


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_training_prompts_are_changed_by_chance_and_held_out_ones_are_not(
    small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_stage, "OTHER_TEMPLATES", ("plain",))
    _chosen(small_target, tmp_path / "plain")
    _, found = _chosen(small_target, tmp_path / "found", "data.template_probability=0.5")
    tokenizer = AutoTokenizer.from_pretrained(small_target.model)
    texts = [tokenizer.decode(row["input_ids"]) for row in found]
    assert 5 < sum(text.startswith("Human:\n") for text in texts) < 45
    held_out = [next((tmp_path / name).glob("artifacts/data-*/held_out.json")) for name in ("plain", "found")]
    assert held_out[0].read_text() == held_out[1].read_text()


def test_prompts_alone_are_held_out_by_their_first_turn_and_answered(
    small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    asked = [row["messages"][0]["content"] for row in read_jsonl(small_target.train)[:60]]
    turns = [{"turns": [text, f"{text} again"]} for text in asked]
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, turns)))
    (tmp_path / "more.txt").write_text("\n".join(f"{i} more" for i in range(5)))
    sources = f"a:{{source:{tmp_path / 'turns.jsonl'}}},b:{{source:{tmp_path / 'more.txt'}}}"
    settings = ("data.train=null", f"data.sources={{{sources}}}", "data.template_probability=0.5")
    answers = ("data.regenerate.enabled=true", "data.regenerate.max_new_tokens=40")
    _, found = _chosen(small_target, tmp_path / "run", *settings, *answers)
    assert len(found) == LIMIT
    [path] = tmp_path.glob("run/artifacts/data-*/held_out.json")
    tokenizer = AutoTokenizer.from_pretrained(small_target.model)
    for one in [*read_json(path)["validation"], *read_json(path)["test"]]:
        assert one["input_ids"] == render_prompt(tokenizer, one["messages"][:1], None, {})
    with pytest.raises(UserError, match=r"data\.sources\.a\.source=.*set data\.regenerate\.enabled=true"):
        _chosen(small_target, tmp_path / "off", *settings)
