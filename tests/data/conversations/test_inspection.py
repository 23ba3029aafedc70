import pytest

from data.conversations.inspection import bracketed, colored, parse_template_kwargs, pieces
from data.conversations.masks import RenderedConversation
from eagle31.errors import UserError
from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import byte_level_tokenizer


def test_colors_follow_the_mask_and_keep_the_text():
    tokenizer = byte_level_tokenizer(None)
    ids = tokenizer("and 猫\nsix")["input_ids"]
    start = ids.index(tokenizer("\n")["input_ids"][0])
    sample = RenderedConversation(ids, [i >= start for i in range(len(ids))])
    parts = pieces(tokenizer, sample)
    assert "".join(part.text for part in parts) == "and 猫\nsix"
    assert [token for part in parts for token in part.ids] == ids
    assert bracketed(parts) == "and 猫[[\nsix]]"
    green, gray = "\x1b[30;", "\x1b[90m"
    text = colored(parts)
    assert text.startswith(gray)
    assert green not in text[: text.index("猫")]
    assert green in text[text.index("猫") :]


def test_pieces_keep_the_spaces_of_sentencepiece():
    tokenizer = templates.sentencepiece_tokenizer("")
    ids = tokenizer("what is two and 猫")["input_ids"]
    parts = pieces(tokenizer, RenderedConversation(ids, [True] * len(ids)))
    assert bracketed(parts) == "[[what is two and 猫]]"


def test_template_kwargs_are_parsed_as_json_if_possible():
    parsed = parse_template_kwargs(["a=false", "b=3", "c=text", "d=x=y", 'e={"f": 1}'])
    assert parsed == {"a": False, "b": 3, "c": "text", "d": "x=y", "e": {"f": 1}}
    with pytest.raises(UserError, match="key=value"):
        parse_template_kwargs(["a"])
