from dataclasses import replace

import pytest

from data.conversations.choices import Turns
from data.conversations.masks import render
from data.conversations.perturbation import (
    SYSTEM_PROMPTS,
    TEMPLATES,
    UNCHANGED,
    PromptSetting,
    check_setting,
)
from data.conversations.prompts import prompt_ids, render_prompt
from data.conversations.schemas import Conversation
from data.conversations.template import decode, eos_token_ids
from eagle31.errors import UserError
from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import byte_level_tokenizer

OWN_TEMPLATES = (templates.CHATML, templates.HEADERS)
MESSAGES = (
    {"role": "system", "content": "be quick"},
    {"role": "user", "content": "user: what is\ntwo and two"},
    {"role": "assistant", "content": "it is four"},
    {"role": "user", "content": "and three"},
    {"role": "assistant", "content": "six"},
)


def tokenizer_of(template: str):
    return byte_level_tokenizer(template, "<|eot_id|>" if "<|eot_id|>" in template else "<|im_end|>")


def prompt_text(template: str, setting: PromptSetting, documents=()) -> str:
    tokenizer = tokenizer_of(template)
    return decode(tokenizer, prompt_ids(tokenizer, MESSAGES[:4], None, {}, setting, documents))


def test_roles_are_renamed_where_the_template_writes_them():
    text = prompt_text(templates.CHATML, PromptSetting(template="renamed_roles"))
    assert text == (
        "<|im_start|>instructions\nbe quick<|im_end|>\n"
        "<|im_start|>customer\nuser: what is\ntwo and two<|im_end|>\n"
        "<|im_start|>clerk\nit is four<|im_end|>\n"
        "<|im_start|>customer\nand three<|im_end|>\n<|im_start|>clerk\n"
    )


def test_whitespace_is_added_around_contents_and_not_within_them():
    text = prompt_text(templates.CHATML, PromptSetting(template="extra_whitespace"))
    assert "<|im_start|>user\n\n\nuser: what is\ntwo and two<|im_end|>\n\n<|im_start|>assistant" in text
    assert text.endswith("<|im_start|>assistant\n\n\n")


def test_another_template_replaces_the_target_s(tmp_path):
    plain = prompt_text(templates.HEADERS, PromptSetting(template="plain"))
    assert plain.endswith("Human:\nand three\n\nAssistant:\n")
    assert "<|start_header_id|>" not in plain
    own = tmp_path / "own.jinja"
    own.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    assert prompt_text(templates.HEADERS, PromptSetting(template=str(own))).endswith(
        "[it is four][and three]"
    )


@pytest.mark.parametrize("own", OWN_TEMPLATES)
@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != UNCHANGED])
def test_the_loss_covers_the_same_completions_under_every_template(own, template):
    tokenizer = tokenizer_of(own)
    conversation = Conversation("some-id", MESSAGES)

    def supervised(changed: Conversation) -> list[str]:
        samples = render(
            tokenizer, changed, turns=Turns.each, template_kwargs={}, eos_token_ids=eos_token_ids(tokenizer)
        )
        return [
            decode(tokenizer, [id for id, mask in zip(s.input_ids, s.loss_mask, strict=True) if mask])
            for s in samples
        ]

    assert supervised(replace(conversation, template=template)) == supervised(conversation)
    assert all(supervised(conversation))


@pytest.mark.parametrize("template", [UNCHANGED, "renamed_roles", "plain"])
def test_a_prompt_in_training_is_that_of_evaluation(template):
    tokenizer = tokenizer_of(templates.CHATML)
    (sample,) = render(
        tokenizer,
        Conversation("some-id", MESSAGES, template=template),
        turns=Turns.last,
        template_kwargs={},
        eos_token_ids=eos_token_ids(tokenizer),
    )
    prompt = render_prompt(tokenizer, MESSAGES[:4], None, {}, template)
    assert sample.input_ids[: sample.num_prompt_tokens] == prompt


def test_system_prompts_are_replaced_and_removed():
    for name, text in SYSTEM_PROMPTS.items():
        found = prompt_text(templates.CHATML, PromptSetting(system=name))
        assert "be quick" not in found
        assert found.count("<|im_start|>system") == (text is not None)
        assert (text or "") in found


def test_documents_lengthen_a_prompt_before_its_first_question():
    documents = ["one two three " * 40, "four five six " * 40, "holds: user: what is\ntwo and two"]
    tokenizer = tokenizer_of(templates.CHATML)
    short = len(prompt_ids(tokenizer, MESSAGES[:4], None, {}, PromptSetting()))
    for num_tokens in (short + 30, short + 200):
        setting = PromptSetting(context_tokens=num_tokens)
        ids = prompt_ids(tokenizer, MESSAGES[:4], None, {}, setting, documents)
        assert num_tokens - 10 <= len(ids) <= num_tokens + 10
        text = decode(tokenizer, ids)
        assert text.count("two and two") == 1
        assert text.index("be quick") < text.index("\n\nuser: what is") < text.index("it is four")


def test_a_change_without_effect_is_refused():
    with pytest.raises(UserError, match="the same"):
        prompt_text(templates.CHATML, PromptSetting(template="chatml"))


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        (PromptSetting(template="nope"), "matrix.template"),
        (PromptSetting(system="nope"), "matrix.system"),
        (PromptSetting(context_tokens=0), "matrix.context_tokens"),
    ],
)
def test_unknown_settings_are_refused(setting, field):
    with pytest.raises(UserError) as refused:
        check_setting(setting, "matrix")
    assert refused.value.field == field
