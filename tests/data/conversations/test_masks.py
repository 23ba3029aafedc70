from typing import Any

import pytest
from transformers import GenerationConfig

from data.conversations import template as template_module
from data.conversations.choices import Turns
from data.conversations.masks import RenderedConversation, render
from data.conversations.prompts import render_prompt
from data.conversations.schemas import Conversation
from data.conversations.template import (
    Template,
    TemplateRefused,
    decode,
    eos_token_ids,
    template_fingerprint,
    uses_generation_markers,
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
    assert not uses_generation_markers(tokenizer)
    assert supervised_texts(tokenizer, sample) == ["it is four<|im_end|>", "six<|im_end|>"]
    assert decode(tokenizer, sample.input_ids).endswith("six<|im_end|>\n")
    assert sample.num_prompt_tokens == len(render_prompt(tokenizer, TWO_TURNS.messages[:2], None, {}))


@pytest.mark.parametrize("marked", [templates.CHATML_MARKED, templates.CHATML_MARKED_CONTENT])
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
def test_markers_and_prefixes_give_the_same_samples(marked, turns, of):
    tokenizer, samples = rendered(marked, turns, of)
    assert uses_generation_markers(tokenizer)
    assert samples == rendered(templates.CHATML, turns, of)[1]


def test_adjacent_markers_are_merged():
    content = "{{- message.content + '<|im_end|>' + '\\n' }}{% endgeneration %}"
    # The markers split "six", which is one token, into "si" and "x".
    first = "{{- message.content[:2] }}{% endgeneration %}{% generation %}"
    halves = first + "{{- message.content[2:] + '<|im_end|>' + '\\n' }}"
    template = templates.CHATML_MARKED.replace(content, halves + "{% endgeneration %}")
    assert template != templates.CHATML_MARKED
    of = conversation("some-id", "and", "six")
    assert rendered(template, of=of)[1] == rendered(templates.CHATML, of=of)[1]


def test_each_gives_one_sample_per_turn_and_last_only_the_last_one():
    tokenizer, each = rendered(templates.CHATML, Turns.each)
    assert [supervised_texts(tokenizer, sample) for sample in each] == [
        ["it is four<|im_end|>"],
        ["six<|im_end|>"],
    ]
    assert decode(tokenizer, each[0].input_ids).endswith("it is four<|im_end|>\n")
    assert rendered(templates.CHATML, Turns.last)[1] == each[1:]


@pytest.mark.parametrize("template", [templates.CHATML, templates.CHATML_MARKED])
def test_turns_of_weight_zero_are_read_and_not_supervised(template):
    roles = ("user", "assistant") * 3
    messages = [{"role": role, "content": f"four {i}"} for i, role in enumerate(roles)]
    for i in (1, 5):
        messages[i]["weight"] = 0
    for turns in Turns:
        tokenizer, (sample,) = rendered(template, turns, Conversation("some-id", tuple(messages)))
        assert supervised_texts(tokenizer, sample) == ["four 3<|im_end|>"]
        assert "four 1" in decode(tokenizer, sample.input_ids)


def test_a_template_that_drops_thinking_from_the_history():
    thoughtful = Conversation(
        "some-id",
        tuple(
            message | ({"reasoning_content": "two two"} if message["role"] == "assistant" else {})
            for message in TWO_TURNS.messages
        ),
    )
    with pytest.raises(UserError, match="<think>") as caught:
        rendered(templates.THINKING, of=thoughtful)
    assert caught.value.field == "target.chat_template"
    for remedy in ("data.turns=each", "data.turns=last", "enable_thinking=false", "{% generation %}"):
        assert remedy in caught.value.remedy
    tokenizer, (first, second) = rendered(templates.THINKING, Turns.each, thoughtful)
    assert supervised_texts(tokenizer, first) == ["<think>\ntwo two\n</think>\n\nit is four<|im_end|>"]
    assert supervised_texts(tokenizer, second) == ["<think>\ntwo two\n</think>\n\nsix<|im_end|>"]
    assert "assistant\nit is four" in decode(tokenizer, second.input_ids)


def test_template_kwargs_change_the_prompt():
    of = conversation("some-id", "what", "four")
    tokenizer, (sample,) = rendered(templates.THINKING, of=of, enable_thinking=False)
    assert supervised_texts(tokenizer, sample) == ["four<|im_end|>"]
    tokenizer, (sample,) = rendered(templates.THINKING, of=of)
    assert supervised_texts(tokenizer, sample) == ["<think>\n\n</think>\n\nfour<|im_end|>"]
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


@pytest.mark.parametrize("template", [templates.INSTRUCTIONS, templates.INSTRUCTIONS_MARKED])
def test_a_sentencepiece_tokenizer_without_a_generation_prompt(template):
    tokenizer = templates.sentencepiece_tokenizer(template)
    of = conversation("some-id", "what is two", "it is four", "and", "six 猫")
    (sample,) = render(tokenizer, of, template_kwargs={}, eos_token_ids=eos_token_ids(tokenizer))
    assert supervised_texts(tokenizer, sample) == ["it is four </s>", "six 猫 </s>"]
    assert sample.num_straddling == 0


def test_a_tokenizer_without_offsets_uses_prefixes():
    tokenizer = templates.python_tokenizer(templates.CHATML_MARKED)
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


@pytest.mark.parametrize("template", [templates.CHATML, templates.CHATML_MARKED])
def test_a_text_that_is_too_long_for_a_tokenizer_is_refused(template, monkeypatch):
    monkeypatch.setattr(Template, "encode", pytest.fail)
    monkeypatch.setattr(template_module, "_MAX_CHARACTERS", 1000)
    with pytest.raises(TemplateRefused, match="more than the 1,000"):
        rendered(template, of=conversation("some-id", "q", "a" * 1000))


def test_a_tokenizer_without_a_template_is_a_user_error():
    tokenizer = byte_level_tokenizer(None)
    with pytest.raises(UserError, match="=FILE"):
        render(tokenizer, TWO_TURNS, template_kwargs={}, eos_token_ids=())
    with pytest.raises(UserError, match="=FILE"):
        render_prompt(tokenizer, TWO_TURNS.messages, None, {})


def test_the_fingerprint_covers_template_and_arguments():
    first, second = byte_level_tokenizer(templates.CHATML), byte_level_tokenizer(templates.HEADERS)
    assert template_fingerprint(first, {}) == template_fingerprint(byte_level_tokenizer(templates.CHATML), {})
    assert template_fingerprint(first, {"a": 1, "b": 2}) == template_fingerprint(first, {"b": 2, "a": 1})
    fingerprints = {template_fingerprint(t, kwargs) for t in (first, second) for kwargs in ({}, {"a": 1})}
    assert len(fingerprints) == 4


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

    assert sample(0, 0, 1, 1).has_supervised_position
    assert not sample(0, 1, 0, 1).has_supervised_position
    assert not sample(0, 0, 1, 1).cut(3).has_supervised_position
