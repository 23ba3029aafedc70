"""The target's reasoning and tool calls in the history of later turns."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data.conversations.schemas import Conversation
from data.conversations.template import Template
from data.generation.dialogue import CUT, EMPTY, NO_ROOM, OTHER_CALLS, UNREADABLE, parsed_turn
from data.generation.regenerate import regenerate
from data.sampling import Sampling
from tests.data.conversations.chat_templates import (
    INSTRUCTIONS,
    NEVER_THINKING,
    PROMPTED_THINKING,
    ROLE_TOKENS,
    ROLES,
    SYSTEM_LAST,
    THINKING,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)
from tests.data.generation.generators import OneAtATime

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# As templates of reasoning models with tools have it: earlier thoughts are left out.
STRUCTURED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and loop.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def call(a: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": {"a": a}}}


def written(a: int) -> str:
    return (
        f"<think>\nI add.\n</think>\n\n<tool_call>\n{json.dumps(call(a)['function'])}\n</tool_call><|im_end|>"
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level_tokenizer(STRUCTURED)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return tokenizer


def regenerated(
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    messages: list[dict],
    answers: list[str],
    stop: str | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return the samples of one conversation for which the target writes the given answers."""

    left = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
    generator = OneAtATime(lambda prompt: left.pop(0))
    rest: dict[str, Any] = {"max_tokens": 500, "template_kwargs": {}}
    rest |= {"directory": directory, "model_fingerprint": "f", "wait_for": Path.stat, **settings}
    sampling = Sampling(100, (tokenizer.convert_tokens_to_ids(stop or tokenizer.eos_token),), 0.0, seed=0)
    return regenerate([Conversation("c", tuple(messages))], tokenizer, generator, sampling, **rest).to_list()


def asked(*, calls: list[dict], content: str = "") -> list[dict]:
    return [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})},
        {"role": "tool", "content": "four"},
        {"role": "assistant", "content": "it is four"},
    ]


def test_calls_stay_calls_and_thoughts_are_left_to_the_template(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = regenerated(tokenizer, tmp_path, asked(calls=[call(2)]), [written(2), "four<|im_end|>"])
    assert [row["id"] for row in rows] == ["c/0", "c/1"]
    prompt = tokenizer.decode(rows[1]["input_ids"][: rows[1]["num_prompt_tokens"]])
    text = json.dumps(call(2)["function"])
    assert f"<|im_start|>assistant\n<tool_call>\n{text}\n</tool_call><|im_end|>\n" in prompt
    assert "I add" not in prompt
    assert "I add" in tokenizer.decode(rows[0]["input_ids"])


@pytest.mark.parametrize(
    ("messages", "answers"),
    [
        (asked(calls=[call(2)]), [written(3), "no"]),  # other arguments
        (asked(calls=[call(2), call(2)]), [written(2), "no"]),  # one call of two
        (asked(calls=[call(2)]), ["four<|im_end|>", "no"]),  # no call
        (asked(calls=[], content="add two"), ["add three<|im_end|>", "no"]),  # other calls in the text
        # A call for which there are no results.
        (
            [*asked(calls=[])[:2], {"role": "user", "content": "and"}, {"role": "assistant", "content": "x"}],
            [written(2), "no"],
        ),
    ],
)
def test_results_that_do_not_fit_end_the_sample(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    messages: list[dict],
    answers: list[str],
) -> None:
    rows = regenerated(tokenizer, tmp_path, messages, answers)
    assert [row["id"] for row in rows] == ["c/0"]
    assert f"1 conversations end where {OTHER_CALLS}" in capsys.readouterr().err


TWO_TURNS = [
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "x"},
]
# As that of gpt-oss: an answer has several messages, of which the history has the last, with another end.
CHANNELS = """\
{%- for message in messages %}
{%- if message.thinking and loop.last %}
{{- '<|im_start|>assistant<channel>analysis<message>' + message.thinking + '<end>' }}
{%- endif %}
{{- '<|im_start|>' + message.role }}
{%- if message.role == 'assistant' %}{{- '<channel>final' }}{%- endif %}
{{- '<message>' + message.content }}
{{- '<|im_end|>' if message.role == 'assistant' and loop.last else '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}"""
CHANNEL_ANSWER = (
    "<channel>analysis<message>Two.<end><|im_start|>assistant<channel>final<message>four<|im_end|>"
)


@pytest.mark.parametrize(
    ("template", "answer", "reason"),
    [
        (STRUCTURED, "<think>\nI add", CUT),
        (STRUCTURED, "<think>I add.</think>four<|im_end|>", UNREADABLE),
        (STRUCTURED, "", EMPTY),
        (NEVER_THINKING, "<think>Two.four<|im_end|>", UNREADABLE),
        (THINKING.replace("think>", "thought>"), "<thought>Two.four<|im_end|>", UNREADABLE),
        (NEVER_THINKING.replace("'<|im_end|>' + ", ""), "<think>Two.</think><|im_end|>", UNREADABLE),
        (CHANNELS.replace("message.thinking", "none"), CHANNEL_ANSWER, UNREADABLE),
        (CHANNELS, CHANNEL_ANSWER.replace("final", "other"), UNREADABLE),
        (CHANNELS, CHANNEL_ANSWER.replace("Two.", "Two.<end><|im_start|>assistant"), UNREADABLE),
    ],
)
def test_a_conversation_ends_where_its_history_would_have_what_the_target_did_not_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, answer: str, reason: str
) -> None:
    tokenizer = byte_level_tokenizer(template)
    marks = [*MARKS, "<channel>", "<message>", "<end>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    rows = regenerated(tokenizer, tmp_path, TWO_TURNS, [answer, "no"])
    assert [row["id"] for row in rows] == ["c/0"][: bool(answer)]
    assert f"1 conversations end where {reason}" in capsys.readouterr().err


def test_a_conversation_ends_where_the_next_prompt_has_no_room(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["four " * 20 + "<|im_end|>", "no"]
    rows = regenerated(tokenizer, tmp_path, TWO_TURNS, answers, max_tokens=30)
    assert [(row["id"], len(row["input_ids"])) for row in rows] == [("c/0", 30)]
    assert f"1 conversations end where {NO_ROOM}" in capsys.readouterr().err


HIDDEN_THINKING = PROMPTED_THINKING.replace("'</think>' + message", "message")


@pytest.mark.parametrize(
    ("template", "thinking", "answer", "history"),
    [
        (NEVER_THINKING, False, "<think>Two.</think>four<|im_end|>", "<think></think>four<|im_end|>"),
        (NEVER_THINKING, False, "four<|im_end|>", "<think></think>four<|im_end|>"),
        (THINKING, False, "four<|im_end|>", "four<|im_end|>"),
        (PROMPTED_THINKING, True, "Two.</think>four<|im_end|>", "</think>four<|im_end|>"),
        (PROMPTED_THINKING, False, "four<|im_end|>", "</think>four<|im_end|>"),
        (HIDDEN_THINKING, True, "Two.</think>\n\nfour<|im_end|>", "\n\nfour<|im_end|>"),
    ],
)
def test_a_history_has_the_thoughts_that_the_template_writes(
    tmp_path: Path, template: str, thinking: bool, answer: str, history: str
) -> None:
    tokenizer, settings = byte_level_tokenizer(template), {"template_kwargs": {"thinking": thinking}}
    rows = regenerated(tokenizer, tmp_path, TWO_TURNS, [answer, "no"], **settings)
    last = tokenizer.decode(rows[-1]["input_ids"])
    assert f"<|im_start|>assistant\n{history}\n<|im_start|>user\nand<|im_end|>\n" in last
    assert tokenizer.decode(rows[0]["input_ids"]).count("Two.") == answer.count("Two.")


def test_the_next_role_ends_an_answer(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(ROLES)
    tokenizer.add_special_tokens({"additional_special_tokens": ROLE_TOKENS})
    answers = ["<think>Two.</think>four<|user|>", "<think></think>six<|user|>"]
    first, second = regenerated(tokenizer, tmp_path, TWO_TURNS, answers, stop="<|user|>")
    assert tokenizer.decode(first["input_ids"]) == f"<|user|>two<|assistant|>{answers[0]}"
    history = "<|user|>two<|assistant|><think></think>four<|user|>and<|assistant|>"
    assert tokenizer.decode(second["input_ids"]) == history + answers[1]


def test_the_system_prompt_of_the_last_message_moves_on(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(SYSTEM_LAST)
    messages = [{"role": "system", "content": "be quick"}, *TWO_TURNS]
    answers = ["four </s>", "six </s>"]
    rows = [tokenizer.decode(row["input_ids"]) for row in regenerated(tokenizer, tmp_path, messages, answers)]
    assert [row.count("be quick") for row in rows] == [1, 1]
    assert "two [/INST] four </s>" in rows[1]
    assert "be quick\n\nand [/INST] six </s>" in rows[1]


@pytest.mark.parametrize("answer", [CHANNEL_ANSWER, "<channel>final<message>four<|im_end|>"])
def test_an_answer_of_several_messages_is_read_as_the_template_writes_it(tmp_path: Path, answer: str) -> None:
    tokenizer = byte_level_tokenizer(CHANNELS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<channel>", "<message>", "<end>"]})
    rows = regenerated(tokenizer, tmp_path, TWO_TURNS, [answer, "no"])
    assert [row["id"] for row in rows] == ["c/0", "c/1"]
    prompt = tokenizer.decode(rows[1]["input_ids"][: rows[1]["num_prompt_tokens"]])
    assert "<|im_start|>assistant<channel>final<message>four<end>" in prompt
    assert "analysis" not in prompt


def test_a_template_may_leave_out_the_space_around_a_text(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(STRUCTURED.replace("message.content", "message.content|trim"))
    rows = regenerated(tokenizer, tmp_path, TWO_TURNS, [" four\n<|im_end|>", "no"])
    assert [row["id"] for row in rows] == ["c/0", "c/1"]


def parsed(tokenizer: PreTrainedTokenizerFast, text: str) -> dict[str, Any] | None:
    history = [{"role": "user", "content": "two"}]
    prompt = tokenizer("<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answer = tokenizer(text)["input_ids"]
    return parsed_turn(Template(tokenizer, None, {}), history, prompt, answer)


def test_a_tokenizers_own_rules_read_formats_that_no_other_reading_knows() -> None:
    template = STRUCTURED.replace("<think>\\n", "[[").replace("\\n</think>", "]]")
    template = template.replace("reasoning_content", "thoughts")
    tokenizer = byte_level_tokenizer(template)
    answer = "[[I add.]]\n\nfour<|im_end|>"
    assert parsed(tokenizer, answer) == {"role": "assistant", "content": answer.removesuffix("<|im_end|>")}
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thoughts": {"open": "[[", "close": "]]"},
            "content": {"close": "<|im_end|>"},
        },
    }
    found = parsed(tokenizer, answer)
    assert found is not None
    assert (found["thoughts"], found["content"].strip()) == ("I add.", "four")
    # What is not written in the format is text.
    assert parsed(tokenizer, "]] four<|im_end|>") == {"role": "assistant", "content": "]] four"}


def test_a_text_that_begins_with_a_space_is_read_again() -> None:
    tokenizer = sentencepiece_tokenizer(INSTRUCTIONS)
    history = [{"role": "user", "content": "two"}]
    prompt = tokenizer("<s>[INST] two [/INST]", add_special_tokens=False)["input_ids"]
    whole = tokenizer("<s>[INST] two [/INST] four </s>", add_special_tokens=False)["input_ids"]
    assert whole[: len(prompt)] == prompt
    turn = parsed_turn(Template(tokenizer, None, {}), history, prompt, whole[len(prompt) :])
    assert turn == {"role": "assistant", "content": "four"}
