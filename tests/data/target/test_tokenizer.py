import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import CTRLTokenizer, PreTrainedTokenizerFast

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
    fingerprint = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "a b"], padding=True, truncation=True, max_length=1)
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    assert tokenizer_fingerprint(_tokenizer(["[UNK]", "b", "a"])) != fingerprint
    with pytest.raises(UserError, match=r"target\.chat_template="):
        load_tokenizer(TargetSpec(str(tmp_path)), str(tmp_path / "absent.jinja"))


def test_the_fingerprint_of_a_tokenizer_in_python_covers_its_files_and_its_code(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab</w>": 2, "<unk>": 3}))

    def fingerprint(merges: str, kind: type[CTRLTokenizer] = CTRLTokenizer) -> str:
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        return tokenizer_fingerprint(kind.from_pretrained(tmp_path))

    class OwnCode(CTRLTokenizer):
        pass

    OwnCode.__name__ = CTRLTokenizer.__name__
    assert fingerprint("a b</w>") == fingerprint("a b</w>") != fingerprint("b a</w>")
    assert fingerprint("a b</w>", OwnCode) != fingerprint("a b</w>")
