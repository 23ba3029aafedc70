import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import byte_level_tokenizer
from tests.train.torchrun import preloaded_python

SCRIPT = Path(__file__).parents[2] / "scripts" / "inspect_data"


@pytest.fixture
def target(tmp_path):
    byte_level_tokenizer(templates.THINKING).save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "target"


def inspect(directory: Path, *arguments: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [preloaded_python(), str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240
    )


def test_a_sample_is_printed_in_brackets(tmp_path, target):
    rows = [{"q": "what is two & two", "a": "four <b>"}, {"q": "and", "a": "six"}, {"q": "only"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = inspect(
        tmp_path,
        *("data.jsonl", "--tokenizer", target, "--prompt-column", "q", "--response-column", "a"),
        *("--template-kwargs", "enable_thinking=false"),
    )
    assert done.returncode == 0, done.stderr
    assert "assistant\n<think>\n\n</think>\n\n[[four <b><|im_end|>]]\n" in done.stdout
    assert "\x1b" not in done.stdout
    for line in (
        "conversations: 2, malformed rows: 1",
        "data.jsonl:3: there is no assistant turn",
        "supervised: ",
        "mask: from prefix differences",
        "template fingerprint: ",
    ):
        assert line in done.stdout


GOOD_ROW = '{"prompt": "what", "response": "four"}'


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("missing.jsonl", None, [], "data=missing.jsonl: "),
        ("a.jsonl", '{"messages": "q"}', [], "data=a.jsonl: "),
        ("a.jsonl", '{"text": "q"}', [], "which --prompt-column and --response-column name."),
        ("a.jsonl", GOOD_ROW, ["--index", "1"], "--index=1: There are 1 conversations"),
        ("a.jsonl", GOOD_ROW, ["--chat-template", "none"], "--chat-template=none: The file cannot be read"),
        ("a.jsonl", GOOD_ROW, ["--tokenizer", "/none"], "--tokenizer=/none: The directory does not exist"),
        ("a.jsonl", GOOD_ROW, ["--template-kwargs", "a"], "--template-kwargs=a: Write key=value"),
    ],
)
def test_a_users_mistake_is_one_message_in_terms_of_the_commands_options(
    tmp_path, target, monkeypatch, capsys, name, content, options, message
):
    if content is not None:
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["inspect_data", name, "--tokenizer", str(target), *options])
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command puts the repository's root there
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed
    assert "data.m" not in printed, "a recipe's setting that the command does not have"
