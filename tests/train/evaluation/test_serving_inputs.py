import json
import os
from pathlib import Path

import pytest
from datasets import Dataset

from eagle31.errors import UserError
from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import byte_level_tokenizer
from train.evaluation.serving_inputs import (
    check_prompts,
    find_prompts,
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
    checkpoint = directory / "artifacts" / "export-1" / "checkpoint"
    checkpoint.mkdir(parents=True)
    (directory / "config.yaml").touch()
    (directory / "export").symlink_to("artifacts/export-1/checkpoint")
    for age, name in enumerate(("answers-new", "answers-old", "answers-unfinished")):
        rows = [{"input_ids": [age, 1, 2, 3], "num_prompt_tokens": 2}] * 3
        Dataset.from_list(rows).save_to_disk(str(directory / "artifacts" / name / "test"))
        os.utime(directory / "artifacts" / name / "test", (1000 - age, 1000 - age))
        if not name.endswith("unfinished"):
            (directory / "artifacts" / name / "stage.json").touch()
    os.utime(directory / "artifacts" / "answers-unfinished" / "test", (2000, 2000))
    return directory / "export"


def test_default_is_the_held_out_prompts_of_the_run(tmp_path: Path) -> None:
    export = run_with_prompts(tmp_path)
    prompts, source = find_prompts(None, export, TOKENIZER, 2)
    assert prompts == [[0, 1]] * 2
    assert "answers-new" in source
    assert run_directory(export.resolve()) == run_directory(export) == tmp_path


def test_prompts_that_are_too_long_are_refused(tmp_path: Path) -> None:
    check_prompts([[1] * 20], room=30, max_new_tokens=10)
    with pytest.raises(UserError, match="--prompts=prompt 1: Its 21 tokens"):
        check_prompts([[1], [1] * 21], room=30, max_new_tokens=10)
    with pytest.raises(UserError, match="no such file"):
        find_prompts(tmp_path / "b.jsonl", tmp_path, TOKENIZER, None)
