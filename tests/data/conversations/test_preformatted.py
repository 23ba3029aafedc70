"""Rows to which a template was applied already."""

from pathlib import Path
from typing import Any

import pytest

from data.conversations.choices import Turns
from data.conversations.masks import RenderedConversation, render
from data.conversations.preformatted import text_splitter
from data.conversations.prompts import prompt_messages, render_prompt
from data.conversations.reading import Source
from data.conversations.schemas import Conversation
from data.conversations.template import Template, decode, eos_token_ids, has_markers
from data.generation.dialogue import Regenerated
from data.target.tokenizer import check_ids
from eagle31.errors import UserError
from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import byte_level_tokenizer
from tests.data.conversations.jsonl_files import conversation, write_jsonl
from tests.data.conversations.test_masks import EMPTY, OPENED, PROMPTED_LINES, supervised_texts

TOKENIZER = byte_level_tokenizer(templates.CHATML)
TWO_TURNS = conversation("id", "what is two", "it is four", "and three", "six", system="be quick")


def read(tmp_path: Path, row: dict[str, Any], tokenizer: Any = TOKENIZER, **settings: Any) -> Conversation:
    split = text_splitter(tokenizer, {}, eos_token_ids(tokenizer))
    source = Source(write_jsonl(tmp_path / "a.jsonl", [row]), **settings)
    [found] = source.reader(split)
    return found


def rendered(
    of: Conversation, tokenizer: Any = TOKENIZER, turns: Turns = Turns.all
) -> list[RenderedConversation]:
    return render(tokenizer, of, turns=turns, template_kwargs={}, eos_token_ids=eos_token_ids(tokenizer))


@pytest.mark.parametrize("turns", list(Turns))
@pytest.mark.parametrize("as_text", [True, False])
def test_a_text_and_ids_give_the_samples_of_their_messages(
    tmp_path: Path, turns: Turns, as_text: bool
) -> None:
    [whole] = rendered(TWO_TURNS)
    row: dict[str, Any] = {"text": decode(TOKENIZER, whole.input_ids)}
    if not as_text:
        row = {"input_ids": whole.input_ids, "loss_mask": whole.loss_mask}
    found = read(tmp_path, row)
    expected = rendered(TWO_TURNS, turns=turns)
    for one, other in zip(rendered(found, turns=turns), expected, strict=True):
        # What follows the last answer is left out.
        assert one.input_ids == other.input_ids[: len(one.input_ids)]
        assert one.loss_mask == other.loss_mask[: len(one.input_ids)]
        assert not any(other.loss_mask[len(one.input_ids) :])
    prompt = render_prompt(TOKENIZER, TWO_TURNS.messages[:-1], None, {})
    assert render_prompt(TOKENIZER, prompt_messages(found), None, {}) == prompt
    assert not has_markers(TOKENIZER, found.messages)


@pytest.mark.parametrize(
    ("template", "text", "supervised"),
    [
        # The generation prompt begins the thought, and a history has none.
        (
            PROMPTED_LINES,
            "<|im_start|>assistant\n<think>\ntwo</think>six<|im_end|>",
            ["two</think>six<|im_end|>"],
        ),
        (PROMPTED_LINES, "<|im_start|>assistant\nsix<|im_end|>", ["six<|im_end|>"]),
        (OPENED, f"<|im_start|>assistant\n{EMPTY}six<|im_end|>", ["six<|im_end|>"]),
        (templates.CHATML, f"<|im_start|>assistant\n{EMPTY}six<|im_end|>", ["six<|im_end|>"]),
        # It was cut.
        (templates.CHATML, "<|im_start|>assistant\nsix", ["six"]),
        (templates.INSTRUCTIONS, "[INST] what [/INST] six <|im_end|>", ["six <|im_end|>"]),
    ],
)
def test_a_text_is_split_where_the_template_begins_an_answer(
    tmp_path: Path, template: str, text: str, supervised: list[str]
) -> None:
    tokenizer = byte_level_tokenizer(template)
    [sample] = rendered(read(tmp_path, {"text": text}, tokenizer), tokenizer)
    assert [one.strip() for one in supervised_texts(tokenizer, sample)] == supervised
    assert decode(tokenizer, sample.input_ids) == text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "### Human: two ### Assistant: six"}, r"no '<\|im_start\|>assistant.*chat_template=FILE"),
        ({"text": "<|im_start|>assistant\nsix<|im_start|>user"}, "none of the target's stop tokens"),
        (
            {"text": "<|im_start|>assistant\nsix\n<|im_start|>assistant\nsix<|im_end|>"},
            "none of the target's",
        ),
        ({"input_ids": [1, 2]}, "Token ids need a column"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "input_ids is not a list of token ids"),
        ({"input_ids": "1 2", "loss_mask": [0, 1]}, "input_ids is not a list of token ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has not one value for each of the 2 tokens"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}, "loss_mask has 2 for token 3, neither 0 nor 1"),
        ({"input_ids": [1, 2, 3], "labels": [-100, 3, -100]}, "labels has 3 for token 2, neither -100 nor 2"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}, "no assistant turn"),
        ({"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1]}, "no two supervised tokens in a row"),
    ],
)
def test_what_is_neither_is_refused_with_its_reason(tmp_path: Path, row: dict, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read(tmp_path, row)


def test_a_question_after_an_answer_without_an_end_is_not_supervised(tmp_path: Path) -> None:
    text = "<|user|>two<|assistant|><think></think>six<|user|>three"  # whose markers are no special tokens
    with pytest.raises(UserError, match="none of the target's stop tokens"):
        read(tmp_path, {"text": text}, byte_level_tokenizer(templates.ROLES))


def test_ids_lose_their_padding_and_begin_with_context(tmp_path: Path) -> None:
    row = {
        "input_ids": [9, 9, 5, 6, 7, 9],
        "completion_mask": [1, 0, 1, 1, 1, 0],
        "attention_mask": [0, 0, 1, 1, 1, 0],
    }
    [sample] = rendered(read(tmp_path, row))
    assert (sample.input_ids, sample.loss_mask) == ([5, 6, 7], [False, True, True])
    [sample] = rendered(read(tmp_path, {"prompt": [900000], "completion": [1, 2]}))
    with pytest.raises(UserError, match="row of token ids, gives token 900000"):
        check_ids(TOKENIZER, sample.input_ids, len(TOKENIZER))


@pytest.mark.parametrize("as_text", [True, False])
def test_the_target_continues_a_text_and_ids(tmp_path: Path, as_text: bool) -> None:
    [whole] = rendered(TWO_TURNS)
    row: dict[str, Any] = {"text": decode(TOKENIZER, whole.input_ids)}
    if not as_text:
        row = {"input_ids": whole.input_ids, "loss_mask": whole.loss_mask}
    found = read(tmp_path, row, require_answer=False)
    stop = TOKENIZER.eos_token_id
    dialogue = Regenerated(found, TOKENIZER, {}, [stop], 500, pytest.fail)
    assert dialogue.next_prompt() is not None
    answer = TOKENIZER("lazy dog")["input_ids"]
    dialogue.add_answer([*answer, stop])
    history = [*TWO_TURNS.messages[:2], {"role": "assistant", "content": "lazy dog"}, TWO_TURNS.messages[3]]
    assert list(dialogue.next_prompt() or []) == render_prompt(TOKENIZER, history, None, {})
    with pytest.raises(UserError, match="has no other messages"):
        Template(TOKENIZER, None, {}).prompt_ids([*TWO_TURNS.messages[:1], *found.messages])
