from collections import Counter
from datetime import date
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import GenerationConfig
from transformers.utils import chat_template_utils

from data.conversations import template as template_module
from data.conversations.choices import Turns
from data.conversations.masks import (
    EMPTY_THOUGHT,
    LOST_CALLS,
    LOST_REASONING,
    REWRITTEN,
    RenderedConversation,
    render,
)
from data.conversations.prompts import render_prompt
from data.conversations.schemas import Conversation
from data.conversations.template import (
    TEXT_ARGUMENTS,
    decode,
    eos_token_ids,
    template_fingerprint,
)
from eagle31.errors import UserError
from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import byte_level_tokenizer
from tests.data.conversations.jsonl_files import conversation

TWO_TURNS = conversation(
    "some-id", "what is two and two", "it is four", "and three", "six", system="be quick"
)


def rendered(template: str, turns: Turns = Turns.all, of: Conversation = TWO_TURNS, **template_kwargs: Any):
    tokenizer = byte_level_tokenizer(template, "<|eot_id|>" if "<|eot_id|>" in template else "<|im_end|>")
    samples = render(
        tokenizer,
        of,
        turns=turns,
        template_kwargs=template_kwargs,
        eos_token_ids=eos_token_ids(tokenizer),
    )
    return tokenizer, samples


def supervised_texts(tokenizer, sample: RenderedConversation) -> list[str]:
    """Decode each run of supervised tokens."""
    runs, previous = [], False
    for token, supervised in zip(sample.input_ids, sample.loss_mask, strict=True):
        if supervised and not previous:
            runs.append([])
        if supervised:
            runs[-1].append(token)
        previous = supervised
    return [decode(tokenizer, run) for run in runs]


def test_a_mask_from_prefixes_covers_what_the_assistant_samples():
    tokenizer, (sample,) = rendered(templates.CHATML)
    assert supervised_texts(tokenizer, sample) == ["it is four<|im_end|>", "six<|im_end|>"]
    assert decode(tokenizer, sample.input_ids).endswith("six<|im_end|>\n")
    assert sample.num_prompt_tokens == len(render_prompt(tokenizer, TWO_TURNS.messages[:2], None, {}))


@pytest.mark.parametrize("turns", list(Turns))
@pytest.mark.parametrize(
    "of",
    [
        TWO_TURNS,
        conversation(
            "some-id", "what", "\n\nsix", "and", "four 猫"
        ),  # "assistant\n\n" is one token; 猫 is three
    ],
)
def test_generation_markers_change_nothing(turns, of):
    assert rendered(templates.CHATML_MARKED, turns, of)[1] == rendered(templates.CHATML, turns, of)[1]


def test_each_gives_one_sample_per_turn_and_last_only_the_last_one():
    tokenizer, each = rendered(templates.CHATML, Turns.each)
    assert [supervised_texts(tokenizer, sample) for sample in each] == [
        ["it is four<|im_end|>"],
        ["six<|im_end|>"],
    ]
    assert decode(tokenizer, each[0].input_ids).endswith("it is four<|im_end|>\n")
    assert rendered(templates.CHATML, Turns.last)[1] == each[1:]


@pytest.mark.parametrize(("context", "supervised"), [({1, 5}, [3]), ({3}, [1, 5])])
def test_turns_of_weight_zero_are_read_and_not_supervised(context, supervised):
    roles = ("user", "assistant") * 3
    messages = [{"role": role, "content": f"four {i}"} for i, role in enumerate(roles)]
    for i in context:
        messages[i]["weight"] = 0
    for turns in Turns:
        tokenizer, samples = rendered(templates.CHATML, turns, Conversation("some-id", tuple(messages)))
        texts = [text for sample in samples for text in supervised_texts(tokenizer, sample)]
        expected = supervised[-1:] if turns is Turns.last else supervised
        assert texts == [f"four {i}<|im_end|>" for i in expected]
        assert f"four {min(context)}" in decode(tokenizer, samples[-1].input_ids)


def answered(*answers: str | dict[str, Any], **keys: Any) -> Conversation:
    """Return a conversation with these answers, whose messages have the given keys."""
    messages: list[dict[str, Any]] = []
    for answer in answers:
        message = answer if isinstance(answer, dict) else {"content": answer}
        asks = {"role": "tool" if messages and messages[-1].get("tool_calls") else "user", "content": "what"}
        messages += [asks, {"role": "assistant", **message, **keys}]
    return Conversation("some-id", tuple(messages))


CALL = {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
EMPTY = "<think>\n\n</think>\n\n"
OPENED = templates.THINKING.replace(
    "assistant\\n' }}\n{%- if enable", "assistant\\n<think>\\n' }}\n{%- if enable"
)


PROMPTED = templates.PROMPTED_THINKING.replace("thinking is defined and thinking", "true")
# As DeepSeek R1's.
PROMPTED_LINES = PROMPTED.replace("'</think>' + ", "").replace("'<think>' if", "'<think>\\n' if")


@pytest.mark.parametrize(
    ("template", "of", "supervised", "notes"),
    [
        # One sample for each answer that later turns have in another way.
        (
            templates.THINKING,
            answered("four", "six", reasoning_content="two two"),
            [
                ["<think>\ntwo two\n</think>\n\nfour<|im_end|>"],
                ["<think>\ntwo two\n</think>\n\nsix<|im_end|>"],
            ],
            {REWRITTEN: 1},
        ),
        # A thought before a call is left out of the answers' history, and answers have none.
        (
            templates.NEVER_THINKING,
            answered(CALL, "six", "four", reasoning_content="two two"),
            [["<think>two two</think><|im_end|>", "six<|im_end|>", "four<|im_end|>"]],
            {LOST_REASONING: 2, EMPTY_THOUGHT: 2, LOST_CALLS: 1},
        ),
        (
            templates.NEVER_THINKING,
            answered("six", "four"),
            [["six<|im_end|>", "four<|im_end|>"]],
            {EMPTY_THOUGHT: 2},
        ),
        (OPENED, answered("four"), [["four<|im_end|>"]], {EMPTY_THOUGHT: 1}),
        # What the data has in a text is the target's.
        (templates.CHATML, answered(EMPTY + "four"), [[EMPTY + "four<|im_end|>"]], {}),
        (
            templates.PROMPTED_THINKING,
            answered("<think>two two</think>four"),
            [["four<|im_end|>"]],
            {LOST_REASONING: 1},
        ),
        # The prompt begins a thought, which history leaves out.
        (PROMPTED, answered("<think>two two</think>four"), [["two two</think>four<|im_end|>"]], {}),
        (
            PROMPTED,
            answered("six", "four", reasoning_content="two"),
            [["two</think>six<|im_end|>"], ["two</think>four<|im_end|>"]],
            {REWRITTEN: 1},
        ),
        (PROMPTED, answered("four"), [["four<|im_end|>"]], {EMPTY_THOUGHT: 1}),
        (
            PROMPTED_LINES,
            answered("<think>\ntwo\n</think>\n\nsix", {"content": "four", "reasoning_content": "\ntwo\n"}),
            [["two\n</think>\n\nsix<|im_end|>"], ["two\n</think>\n\nfour<|im_end|>"]],
            {REWRITTEN: 1},
        ),
        (PROMPTED_LINES, answered("four"), [["four<|im_end|>"]], {EMPTY_THOUGHT: 1}),
        # The prompt skips the thought.
        (
            PROMPTED_LINES.replace("<think>\\n'", f"{EMPTY}'".replace("\n", "\\n")),
            answered("<think>\ntwo\n</think>\n\nfour"),
            [["four<|im_end|>"]],
            {LOST_REASONING: 1},
        ),
    ],
)
def test_thoughts_are_supervised_as_the_target_writes_them(template, of, supervised, notes):
    tokenizer, samples = rendered(template, of=of)
    assert [supervised_texts(tokenizer, sample) for sample in samples] == supervised
    assert sum((sample.notes for sample in samples), Counter()) == Counter(notes)


# As gpt-oss's: the thoughts before a call stay until the answer, and what a tool said is JSON.
KEPT_THINKING = templates.THINKING.replace("loop.last", "(loop.last or messages[-1].role == 'tool')").replace(
    "message.content +", "(message.content | tojson if message.role == 'tool' else message.content) +"
)


@pytest.mark.parametrize("template", [templates.THINKING, KEPT_THINKING])
def test_what_history_a_sample_has_is_what_is_served(template):
    of = answered("four", CALL, "six", reasoning_content="two two")
    of.messages[4]["content"] = "what\nis"
    each, every = (rendered(template, turns, of)[1] for turns in (Turns.each, Turns.all))
    tokenizer = byte_level_tokenizer(template)
    for i, (sample,) in ((1, each[:1]), (3, each[1:2]), (5, each[2:]), (5, every[-1:])):
        prompt = render_prompt(tokenizer, of.messages[:i], None, {})
        assert sample.input_ids[: len(prompt)] == prompt
        assert all(sample.loss_mask[len(prompt) : -1])
    texts = [
        sorted(text for one in samples for text in supervised_texts(tokenizer, one))
        for samples in (each, every)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("argument", ["thinking", "enable_thinking"])
def test_a_prompt_that_no_answer_follows_is_refused(argument):
    template = templates.PROMPTED_THINKING.replace("thinking", argument).replace("'<think>' if", "'think' if")
    with pytest.raises(UserError, match="think") as caught:
        rendered(template, of=answered("four"), **{argument: True})
    assert caught.value.field == "target.chat_template"
    for remedy in ("data.regenerate.enabled=true", f"kwargs.{argument}=false"):
        assert remedy in caught.value.remedy


@pytest.mark.parametrize("turns", list(Turns))
def test_the_role_that_follows_ends_a_turn(turns):
    tokenizer = byte_level_tokenizer(templates.ROLES)
    tokenizer.add_special_tokens({"additional_special_tokens": templates.ROLE_TOKENS})
    eos = tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>"])
    of = answered("four", {**CALL, "reasoning_content": "two two"}, "six")
    samples = render(tokenizer, of, turns=turns, template_kwargs={}, eos_token_ids=eos)
    expected = [
        "four<|user|>",
        "<think>two two</think><call>add</call><|tool|>",
        "six<|user|>",
    ]
    texts = [text for sample in samples for text in supervised_texts(tokenizer, sample)]
    assert texts == (expected[-1:] if turns is Turns.last else expected)
    assert not any(one.notes[LOST_CALLS] for one in samples)


@pytest.mark.parametrize("turns", list(Turns))
@pytest.mark.parametrize("system", ["be quick", None])
def test_a_system_prompt_in_the_last_message_is_in_each_prompt(turns, system):
    tokenizer = templates.sentencepiece_tokenizer(templates.SYSTEM_LAST)
    of = conversation("some-id", "what is two", "it is four", "what is two", "six", system=system)
    stops = eos_token_ids(tokenizer)
    samples = render(tokenizer, of, turns=turns, template_kwargs={}, eos_token_ids=stops)
    texts = [decode(tokenizer, one.input_ids).replace("<s> ", "<s>") for one in samples]
    found = [(text, supervised_texts(tokenizer, one)) for text, one in zip(texts, samples, strict=True)]
    asked = f"[INST] {system}\n\nwhat is two [/INST]" if system else "[INST] what is two [/INST]"
    first = (f"<s>{asked} it is four </s>", ["it is four </s>"])
    last = (f"<s>[INST] what is two [/INST] it is four </s><s>{asked} six </s>", ["six </s>"])
    expected = {Turns.all: [first, last], Turns.each: [first, last], Turns.last: [last]}[turns]
    if turns is Turns.all and system is None:
        whole = "<s>[INST] what is two [/INST] it is four </s><s>[INST] what is two [/INST] six </s>"
        expected = [(whole, first[1] + last[1])]
    assert found == expected


def test_turns_are_found_where_a_normalizer_changes_the_text():
    tokenizer = byte_level_tokenizer(templates.CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    of = conversation("some-id", "what", "e\u0301 six", "and", "four")
    (sample,) = render(tokenizer, of, template_kwargs={}, eos_token_ids=eos_token_ids(tokenizer))
    assert supervised_texts(tokenizer, sample) == ["\u00e9 six<|im_end|>", "four<|im_end|>"]


def test_template_kwargs_change_the_prompt():
    of = conversation("some-id", "what", "four")
    tokenizer, (sample,) = rendered(templates.THINKING, of=of, enable_thinking=False)
    assert supervised_texts(tokenizer, sample) == ["four<|im_end|>"]
    assert not sample.notes.total()
    prompt = render_prompt(tokenizer, of.messages[:1], None, {"enable_thinking": False})
    assert decode(tokenizer, prompt).endswith("</think>\n\n")


def test_tokens_across_the_start_of_a_turn_are_masked():
    of = conversation("some-id", "what", "\n\nsix\n", "and", "four")
    tokenizer, (sample,) = rendered(templates.PLAIN, of=of)
    newlines = tokenizer("\n\n")["input_ids"]
    assert len(newlines) == 1
    # The newline of "assistant\n" and the first newline of "\n\nsix" are one token.
    assert sample.num_straddling == 1
    assert supervised_texts(tokenizer, sample) == ["\nsix\n\n", "four\n"]


def test_tokens_across_the_end_of_a_turn_are_masked():
    # A role that starts with newlines merges with the newline that ends the previous turn.
    template = templates.PLAIN.replace(
        "{{- message.role", "{{- '\\n\\n' * (loop.index0 % 2 == 0) + message.role"
    )
    tokenizer, (sample,) = rendered(template, of=conversation("some-id", "what", "six", "and", "four"))
    assert sample.num_straddling == 1
    assert supervised_texts(tokenizer, sample) == ["six", "four\n"]


def test_a_sentencepiece_tokenizer_without_a_generation_prompt():
    tokenizer = templates.sentencepiece_tokenizer(templates.INSTRUCTIONS)
    of = conversation("some-id", "what is two", "it is four", "and", "six 猫")
    (sample,) = render(tokenizer, of, template_kwargs={}, eos_token_ids=eos_token_ids(tokenizer))
    assert supervised_texts(tokenizer, sample) == ["it is four </s>", "six 猫 </s>"]
    assert sample.num_straddling == 0


def test_a_tokenizer_without_offsets_uses_prefixes():
    tokenizer = templates.python_tokenizer(templates.CHATML)
    (sample,) = render(
        tokenizer,
        TWO_TURNS,
        template_kwargs={},
        eos_token_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
    )
    assert supervised_texts(tokenizer, sample) == ["it is four<|im_end|>", "six<|im_end|>"]


def test_tools_and_reasoning_reach_the_template_unchanged():
    template = "{{- tools | tojson }}" + templates.CHATML.replace(
        "message.content", "message.content + (message.tool_calls | default([]) | tojson)"
    )
    call = {"function": {"name": "add", "arguments": {"b": 1, "a": 2}}}
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]})
    of = Conversation("some-id", messages, ({"name": "add"},))
    tokenizer, (sample,) = rendered(template, of=of)
    expected = '[{"function": {"name": "add", "arguments": {"b": 1, "a": 2}}}]<|im_end|>'
    assert supervised_texts(tokenizer, sample) == [expected]
    assert decode(tokenizer, sample.input_ids).startswith('[{"name": "add"}]')


@pytest.mark.parametrize("takes_text", [True, False])
def test_a_template_that_joins_arguments_to_the_text_gets_them_as_json(takes_text):
    written = "(message.tool_calls[0].function.arguments if message.tool_calls else '') + '<|im_end|>'"
    template = templates.CHATML.replace(
        "'<|im_end|>'", written if takes_text else written.replace("arguments", "name")
    )
    call = {"function": {"name": "add", "arguments": {"b": "é", "a": [2]}}}
    tokenizer, (sample,) = rendered(template, of=answered(CALL | {"tool_calls": [call]}))
    expected = '{"b": "é", "a": [2]}' if takes_text else "add"
    assert supervised_texts(tokenizer, sample) == [f"{expected}<|im_end|>"]
    assert sample.notes[TEXT_ARGUMENTS] == takes_text


def test_what_is_no_template_is_refused():
    with pytest.raises(UserError, match=r"It is no Jinja template: .*banana.*in line 2"):
        rendered("\n{% banana %}")


def test_a_template_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(template_module, "_MOST_SECONDS", 0.1)
    loop = "{% for i in range(99999) %}"
    with pytest.raises(UserError, match="without an end"):
        rendered(f"{loop}{loop}{{% endfor %}}{{% endfor %}}")


def test_the_fingerprint_covers_template_and_arguments():
    first, second = byte_level_tokenizer(templates.CHATML), byte_level_tokenizer(templates.HEADERS)
    assert template_fingerprint(first, {}) == template_fingerprint(byte_level_tokenizer(templates.CHATML), {})
    assert template_fingerprint(first, {"a": 1, "b": 2}) == template_fingerprint(first, {"b": 2, "a": 1})
    fingerprints = {template_fingerprint(t, kwargs) for t in (first, second) for kwargs in ({}, {"a": 1})}
    assert len(fingerprints) == 4


def test_a_template_has_the_same_date_on_each_day(monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", None)  # no clock
    clock = "{{- strftime_now('%d %B %Y') }}"
    tokenizer, (sample,) = rendered(clock + templates.CHATML)
    assert decode(tokenizer, sample.input_ids).startswith("01 January 2026<|im_start|>")
    dated, plain = byte_level_tokenizer(clock + templates.CHATML), byte_level_tokenizer(templates.CHATML)
    before = [template_fingerprint(tokenizer, {}) for tokenizer in (dated, plain)]
    monkeypatch.setattr(template_module, "DATE", date(2026, 1, 2))
    after = [template_fingerprint(tokenizer, {}) for tokenizer in (dated, plain)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True]


def test_end_of_turn_tokens_come_from_tokenizer_and_generation_config(tmp_path):
    tokenizer = byte_level_tokenizer(templates.CHATML)
    end, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>"])
    assert eos_token_ids(tokenizer) == {end}
    GenerationConfig(eos_token_id=[other, end]).save_pretrained(tmp_path)
    tokenizer.name_or_path = str(tmp_path)
    assert eos_token_ids(tokenizer) == {end, other}


def test_a_supervised_position_needs_two_consecutive_tokens():
    def sample(*mask: int) -> RenderedConversation:
        return RenderedConversation([0] * len(mask), [bool(m) for m in mask])

    assert sample(0, 0, 1, 1).min_tokens == 4
    assert sample(0, 1, 0, 1).min_tokens is None
    assert sample(0, 0, 1, 1).cut(3) == sample(0, 0, 1)
    assert sample(0, 0, 1).min_tokens is None
