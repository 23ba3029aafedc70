import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from data.text.inspection import bracketed, coloured, parse_template_kwargs, pieces
from data.text.template import RenderedConversation
from eagle31.errors import UserError
from tests.data.text import chat_templates as templates
from tests.data.text.chat_templates import byte_level_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "inspect_data"


@pytest.fixture
def target(tmp_path):
    byte_level_tokenizer(templates.THINKING).save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "target"


def inspect(directory: Path, *arguments: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


def test_prints_a_sample_in_brackets_and_writes_a_page(tmp_path, target):
    rows = [{"q": "what is two & two", "a": "four <b>"}, {"q": "and", "a": "six"}, {"q": "only"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = inspect(
        tmp_path,
        *("data.jsonl", "--tokenizer", target, "--prompt-column", "q", "--response-column", "a"),
        *("--template-kwargs", "enable_thinking=false", "--html", "page.html"),
    )
    assert done.returncode == 0, done.stderr
    assert "assistant\n<think>\n\n</think>\n\n[[four <b><|im_end|>]]\n" in done.stdout
    assert "\x1b" not in done.stdout
    for fact in (
        "conversations: 2, malformed rows: 1",
        "data.jsonl:3: no assistant turn",
        "mask: from prefix differences",
        "template fingerprint: ",
    ):
        assert fact in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert "&lt;|im_end|&gt;" in page
    assert "<b>" not in page


def test_user_errors_are_one_message(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["inspect_data", "missing.jsonl", "--tokenizer", "none"])
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts the repository's root there
    with pytest.raises(SystemExit, match=r"^inspect_data: data=missing\.jsonl: No such file"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_colours_follow_the_mask_and_lose_no_text():
    tokenizer = byte_level_tokenizer(None)
    ids = tokenizer("and 猫\nsix")["input_ids"]
    start = ids.index(tokenizer("\n")["input_ids"][0])
    sample = RenderedConversation(ids, [i >= start for i in range(len(ids))])
    parts = pieces(tokenizer, sample)
    assert "".join(part.text for part in parts) == "and 猫\nsix"
    assert [token for part in parts for token in part.ids] == ids
    assert bracketed(parts) == "and 猫[[\nsix]]"
    green, grey = "\x1b[30;", "\x1b[90m"
    text = coloured(parts)
    assert text.startswith(grey)
    assert green not in text[: text.index("猫")]
    assert green in text[text.index("猫") :]


def test_pieces_keep_the_spaces_of_sentencepiece():
    tokenizer = templates.sentencepiece_tokenizer("")
    ids = tokenizer("what is two and 猫")["input_ids"]
    parts = pieces(tokenizer, RenderedConversation(ids, [True] * len(ids)))
    assert bracketed(parts) == "[[what is two and 猫]]"


def test_template_kwargs_are_json_where_they_can_be():
    parsed = parse_template_kwargs(["a=false", "b=3", "c=text", "d=x=y", 'e={"f": 1}'])
    assert parsed == {"a": False, "b": 3, "c": "text", "d": "x=y", "e": {"f": 1}}
    with pytest.raises(UserError, match="key=value"):
        parse_template_kwargs(["a"])
