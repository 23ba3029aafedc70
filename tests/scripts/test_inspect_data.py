import json
from pathlib import Path

import pytest

from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import byte_level_tokenizer
from tests.data.conversations.jsonl_files import conversation
from tests.runs.here import run_command

SCRIPT = "scripts/inspect_data"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    byte_level_tokenizer(templates.THINKING).save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "target"


def test_a_sample_is_printed_in_brackets(tmp_path: Path, target: Path) -> None:
    rows = [{"q": "what is two & two", "a": "four <b>"}, {"q": "and", "a": "six"}, {"q": "only"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run_command(
        SCRIPT,
        *("data.jsonl", "--tokenizer", target, "--prompt-column", "q", "--response-column", "a"),
        *("--template-kwargs", "enable_thinking=false"),
        directory=tmp_path,
    )
    assert done.status == 0, done.err
    assert "assistant\n<think>\n\n</think>\n\n[[four <b><|im_end|>]]\n" in done.out
    assert "\x1b" not in done.out
    for line in (
        "conversations: 2, malformed rows: 1",
        "data.jsonl:3: There is no column a.",
        "supervised: ",
        "mask: what follows each turn's prompt",
        "template fingerprint: ",
    ):
        assert line in done.out


def test_a_limit_of_no_tokens_is_refused(tmp_path: Path, target: Path) -> None:
    done = run_command(SCRIPT, "data.jsonl", "--tokenizer", target, "--max-tokens", -5, directory=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert "--max-tokens=-5: It must be at least 1" in done.err


def test_what_is_left_out_is_listed_with_the_reason(tmp_path: Path, target: Path) -> None:
    turns = list(conversation("", "what", "six", "and", "four", "q").messages)
    messages = [turns[1], *turns, {"role": "user", "content": " "}]
    messages[2] = turns[1] | {"weight": 0}
    rows = [{"messages": messages, "topic": 1}, {"messages": []}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ("--template-kwargs", "enable_thinking=false", "--max-tokens", "20")
    done = run_command(SCRIPT, "data.jsonl", "--tokenizer", target, *given, directory=tmp_path)
    assert done.status == 0, done.err
    assert "what<|im_end|>\n<|im_start|>assistant\nsix<|im_end|>" in done.out
    for line in (
        "columns: messages; not used: topic",
        "rows of which nothing can be used: 1\n  ",
        "data.jsonl:2: there is no assistant turn (no messages)",
        "rows that have an empty message: only the turns before it are used: 1",
        "  left out: an empty message: only the turns before it are used",
        "  left out: a start with the assistant: only the turns from the user's first one on are used",
        "  left out: 1 assistant turns of weight 0: context only",
        "  left out: 1 messages after the last supervised turn",
        "  left out: the tokens after the first 20 of a sample (--max-tokens)",
    ):
        assert line in done.out


def test_of_prompts_alone_the_first_one_is_shown(tmp_path: Path, target: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"turns": ["what is two", "and three"]}')
    given = ("data.jsonl", "--tokenizer", target)
    done = run_command(SCRIPT, *given, "--regenerate", directory=tmp_path)
    assert done.status == 0, done.err
    assert done.out.startswith("<|im_start|>user\nwhat is two<|im_end|>\n<|im_start|>assistant\n\n")
    assert "mask: the target's answers, 2 turns" in done.out
    refused = run_command(SCRIPT, *given, directory=tmp_path)
    assert refused.status == 2
    assert "set --regenerate, with which the target writes the answers" in refused.err


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "data=a.jsonl: "),
        ('{"sentence": "q"}', [], "which --prompt-column and --response-column name."),
        ('{"prompt": "what", "response": "four"}', ["--index", "1"], "--index=1: There are 1 conversations"),
        ('{"prompt": "what", "response": "four"}', ["--template-kwargs", "a"], "--template-kwargs=a: Write"),
    ],
)
def test_a_users_mistake_is_one_message_in_terms_of_the_commands_options(
    tmp_path: Path, target: Path, content: str | None, options: list[str], message: str
) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    done = run_command(SCRIPT, "a.jsonl", "--tokenizer", target, *options, directory=tmp_path)
    assert done.status == 2
    assert done.err.startswith("error: ")
    assert message in done.err
    assert "data.m" not in done.err, "a recipe's setting that the command does not have"
