from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from data.conversations.template import name_of
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer, tokenizer_fingerprint
from eagle31.errors import UserError
from tests.data.target.tiny_target import save_target


def _tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0], pad_token=words[0])


def test_a_template_file_replaces_the_template_and_not_the_fingerprint(tmp_path: Path) -> None:
    _tokenizer(["[UNK]", "a", "b"]).save_pretrained(tmp_path)
    save_target(tmp_path)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    tokenizer = load_tokenizer(TargetSpec(str(tmp_path)), str(template))
    assert tokenizer.chat_template == "{{ messages }}"
    assert name_of(tokenizer) == str(template)
    fingerprint = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "a b"], padding=True, truncation=True, max_length=1)
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    assert tokenizer_fingerprint(_tokenizer(["[UNK]", "b", "a"])) != fingerprint
    with pytest.raises(UserError, match=r"target\.chat_template="):
        load_tokenizer(TargetSpec(str(tmp_path)), str(tmp_path / "absent.jinja"))
