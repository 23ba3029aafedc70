import json
import os
from pathlib import Path

import pytest
from datasets import Dataset

from eagle31.errors import UserError
from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import byte_level_tokenizer
from train.parity.prompts import check_prompts, find_prompts, read_prompts, run_directory

TOKENIZER = byte_level_tokenizer(templates.THINKING)


def test_token_ids_are_read_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt_token_ids": [1, 2]}\n\n{"prompt_token_ids": [3]}\n')
    (tmp_path / "b.jsonl").write_text("[4, 5]\n[6]\n")
    assert read_prompts(tmp_path / "a.jsonl", TOKENIZER) == [[1, 2], [3]]
    assert read_prompts(tmp_path / "b.jsonl", TOKENIZER) == [[4, 5], [6]]


@pytest.mark.parametrize("row", ['{"prompt_token_ids": "a"}', "[1, 2.5]", "[1, 2", "[true]"])
def test_invalid_rows_are_refused_with_their_line(tmp_path: Path, row: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"[1]\n{row}\n")
    with pytest.raises(UserError, match=r"a\.jsonl:2"):
        read_prompts(tmp_path / "a.jsonl", TOKENIZER)


def test_conversations_end_with_the_generation_prompt(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "and"}, {"role": "assistant", "content": "six"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (ids,) = read_prompts(tmp_path / "a.jsonl", TOKENIZER)
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


def test_without_a_run_prompts_have_to_be_given(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give prompts with --prompts FILE"):
        find_prompts(None, tmp_path, TOKENIZER, None)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match="has no prompt"):
        find_prompts(tmp_path / "a.jsonl", tmp_path, TOKENIZER, None)
    with pytest.raises(UserError, match="No such file"):
        find_prompts(tmp_path / "b.jsonl", tmp_path, TOKENIZER, None)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [([], "It is empty"), ([1, 100], "Token 100 is outside"), ([-1], "outside"), ([1] * 21, "21 tokens and")],
)
def test_prompts_that_no_engine_would_accept_are_refused(prompt: list[int], why: str) -> None:
    check_prompts([[1] * 20], vocab_size=100, room=30, max_new_tokens=10)
    with pytest.raises(UserError, match=rf"--prompts=prompt 1: .*{why}|{why}"):
        check_prompts([[1], prompt], vocab_size=100, room=30, max_new_tokens=10)
