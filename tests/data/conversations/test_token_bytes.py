import random

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from data.conversations import boundaries
from data.conversations.choices import Turns
from data.conversations.masks import render
from data.conversations.schemas import Conversation
from data.conversations.template import Template
from data.conversations.token_bytes import token_ends
from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import (
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)
from tests.data.conversations.jsonl_files import conversation

PIECES = [
    "four ",
    "five\n\n",
    " ",
    "six",
    "é",
    "e\u0301",
    "日本",
    "\n",
    "three",
    "🙂",
    "<|im_end|>",
    "\t",
    "two",
]


def conversations(number: int) -> list[Conversation]:
    rng = random.Random(0)
    found = []
    for index in range(number):
        contents = ["".join(rng.choices(PIECES, k=rng.randint(1, 8))) for _ in range(2 * rng.randint(1, 3))]
        found.append(conversation(str(index), *contents))
    return found


def test_the_ends_are_those_of_the_tokens_bytes():
    tokenizer = byte_level_tokenizer(None)
    text = "the quick 日本 six<|im_end|>\n\n🙂"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ends = token_ends(tokenizer, text, ids)
    assert ends is not None
    assert len(ends) == len(ids)
    assert ends[-1] == len(text.encode())
    end = ids.index(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    assert text.encode()[ends[end - 1] : ends[end]] == b"<|im_end|>"
    assert token_ends(tokenizer, text + " ", ids) is None


def composing_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return one that joins letters and accents before it encodes them, as Qwen's."""
    tokenizer = byte_level_tokenizer(template)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (composing_tokenizer, "PLAIN"),
        (composing_tokenizer, "HEADERS"),
        (byte_level_tokenizer, "PLAIN"),
        (byte_level_tokenizer, "HEADERS"),
        (sentencepiece_tokenizer, "INSTRUCTIONS"),
        (sentencepiece_tokenizer, "PLAIN"),
    ],
)
def test_one_encoding_finds_the_same_tokens_as_encoding_each_prompt(make, name, monkeypatch):
    tokenizer = make(getattr(templates, name))
    settings = {"turns": Turns.each, "template_kwargs": {}, "eos_token_ids": {tokenizer.eos_token_id}}
    data = conversations(60)
    found = [render(tokenizer, one, **settings) for one in data]
    template = Template(tokenizer, None, {})
    texts = [tokenizer.apply_chat_template(one.messages, tokenize=False) for one in data]
    assert all(boundaries.encoded(template, text).ends for text in texts)
    monkeypatch.setattr(boundaries, "token_ends", lambda *_: None)
    assert [render(tokenizer, one, **settings) for one in data] == found
    if name == "PLAIN":
        assert sum(sample.num_straddling for samples in found for sample in samples) > 3
