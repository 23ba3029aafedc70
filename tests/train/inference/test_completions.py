"""The stages that need the target's completions, with vLLM and with transformers."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, load_from_disk

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_jsonl
from tests.train import small_run
from tests.train.small_run import RECIPE
from tests.train.torchrun import composed, run_here
from train.config.run import check
from train.inference import completions

NUM_CONVERSATIONS = 16


def arguments(target: EmbeddedTarget, data: Path, output_dir: Path) -> list[str]:
    """Return settings with one prompt per batch: completions then do not depend on other prompts."""
    few = ["data.num_validation=3", "data.num_test=3", "data.max_tokens=192", "evaluate.max_new_tokens=16"]
    regenerate = [
        "data.regenerate.enabled=true",
        "data.regenerate.max_new_tokens=12",
        "data.regenerate.batch_size=1",
    ]
    given = [f"data.train={data}", "stages=[data,vocab,answers]"]
    return [*small_run.arguments(target, output_dir), *few, *regenerate, *given]


def two_turns(target: EmbeddedTarget, path: Path) -> Path:
    """Write conversations of two turns, each made of two short ones."""
    rows = sorted((row["messages"] for row in read_jsonl(target.train)), key=lambda row: len(str(row)))
    pairs = zip(rows[: 2 * NUM_CONVERSATIONS : 2], rows[1 : 2 * NUM_CONVERSATIONS : 2], strict=True)
    path.write_text("".join(json.dumps({"messages": one + other}) + "\n" for one, other in pairs))
    return path


def results(output_dir: Path) -> list[Dataset]:
    names = ("data-*/train", "answers-*/validation", "answers-*/test")
    paths = [next((output_dir / "artifacts").glob(name)) for name in names]
    return [load_from_disk(str(path)) for path in paths]


def test_vllm_writes_the_same_completions_as_transformers(
    small_target: EmbeddedTarget, vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = two_turns(small_target, tmp_path / "data.jsonl")
    run_here(RECIPE, *arguments(small_target, data, tmp_path / "hf"))
    monkeypatch.setattr(completions, "load_target", lambda *_: pytest.fail("loaded through transformers"))
    run_here(RECIPE, *arguments(small_target, data, tmp_path / "vllm"), "target.engine=vllm")
    for ours, theirs in zip(results(tmp_path / "vllm"), results(tmp_path / "hf"), strict=True):
        assert ours.to_list() == theirs.to_list()
    turns = {row["id"].rpartition("/")[2] for row in results(tmp_path / "vllm")[0]}
    assert turns == {"0", "1"}
    [file] = (tmp_path / "vllm" / "artifacts").glob("answers-*/test.jsonl")
    assert read_jsonl(file)[0]["engine"] == "vllm"


def test_kimis_recipe_can_regenerate_the_data_with_vllm() -> None:
    config = composed("kimi_k2_6", "data.regenerate.enabled=true")
    check(config)
    assert config.target.engine.value == "vllm"
