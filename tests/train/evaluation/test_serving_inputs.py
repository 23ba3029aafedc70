import json
from pathlib import Path

import pytest
from datasets import Dataset

from eagle31.errors import UserError
from eagle31.json_files import write_json
from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import byte_level_tokenizer
from train.evaluation.serving_inputs import (
    check_prompts,
    find_prompts,
    parse_engine_arguments,
    run_directory,
)

TOKENIZER = byte_level_tokenizer(templates.THINKING)


def test_conversations_end_with_the_generation_prompt(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "and"}, {"role": "assistant", "content": "six"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (ids,), _ = find_prompts(tmp_path / "a.jsonl", tmp_path, TOKENIZER, None)
    text = TOKENIZER.decode(ids)
    assert "and" in text
    assert "six" not in text
    assert "<|im_start|>assistant" in text


def run_with_prompts(directory: Path) -> Path:
    """Make an output directory with a link to its export, as a run leaves it; return the link."""
    results, made_from = (
        directory / "artifacts",
        {"export": "train", "train": "capture", "capture": "answers"},
    )
    for stage, origin in made_from.items():
        write_json(results / f"{stage}-1" / "stage.json", {"inputs": {origin: f"{origin}-1"}})
    for name, first in (("answers-1", 0), ("answers-of-another-run", 1)):
        rows = [{"input_ids": [first, 1, 2, 3], "num_prompt_tokens": 2}] * 3
        Dataset.from_list(rows).save_to_disk(str(results / name / "test"))
    (results / "export-1" / "checkpoint").mkdir()
    (directory / "run.json").touch()
    (directory / "export").symlink_to("artifacts/export-1/checkpoint")
    return directory / "export"


def test_default_is_the_held_out_prompts_of_the_run(tmp_path: Path) -> None:
    export = run_with_prompts(tmp_path)
    prompts, source = find_prompts(None, export, TOKENIZER, 2)
    assert prompts == [[0, 1]] * 2
    assert "answers-1" in source
    assert run_directory(export.resolve()) == run_directory(export) == tmp_path
    earlier = tmp_path / "artifacts" / "export-0" / "checkpoint"
    earlier.mkdir(parents=True)
    assert run_directory(earlier) is None  # its speed is not to replace that of the run's export


@pytest.mark.parametrize("argument", ["dtype=float16", "model=another", "speculative_config={method: mtp}"])
def test_arguments_of_the_engine_that_options_set_are_refused(argument: str) -> None:
    assert parse_engine_arguments(["tensor_parallel_size=2"]) == {"tensor_parallel_size": 2}
    with pytest.raises(UserError, match=r"--engine-args=.*Give "):
        parse_engine_arguments([argument])


def test_prompts_that_are_too_long_are_refused(tmp_path: Path) -> None:
    check_prompts([[1] * 20], room=30, max_new_tokens=10)
    with pytest.raises(UserError, match="--prompts=prompt 1: Its 21 tokens"):
        check_prompts([[1], [1] * 21], room=30, max_new_tokens=10)
    with pytest.raises(UserError, match="no such file"):
        find_prompts(tmp_path / "b.jsonl", tmp_path, TOKENIZER, None)
