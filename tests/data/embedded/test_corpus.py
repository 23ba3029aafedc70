from pathlib import Path

import pytest

from data.embedded.corpus import is_held_out, read_corpus
from eagle31.errors import UserError
from tests.data.embedded.tiny_embedded import body_of


def test_the_corpus_has_each_documented_body_once(library: Path) -> None:
    corpus = read_corpus(library)
    conversations = corpus.train + corpus.held_out
    answers = [c["messages"][1]["content"] for c in conversations]
    assert len(answers) == 80
    bodies = [answer.split("\n", 1)[1] for answer in answers]
    assert sorted(bodies) == sorted(f"    y = x + {i}\n    return y" for i in range(80))
    assert len({c["id"] for c in conversations}) == 80
    assert all(is_held_out(body_of(c["messages"][1]["content"])) for c in corpus.held_out)
    assert not any(is_held_out(body_of(c["messages"][1]["content"])) for c in corpus.train)


def test_a_request_has_class_signature_and_summary(tmp_path: Path) -> None:
    source = "\n".join(
        f"class A:\n    async def f{i}(self, x: int = 1) -> int:\n"
        f'        """Adds {i}\n        twice.\n\n        More."""\n        return {i}\n'
        for i in range(60)
    )
    (tmp_path / "m.py").write_text(source)
    user, assistant = read_corpus(tmp_path).train[0]["messages"]
    signature = "async def f0(self, x: int=1) -> int:"
    summary = '    """Adds 0\n    twice."""'
    assert user["content"] == f"Write this function.\n\n# class A\n{signature}\n{summary}"
    assert assistant["content"] == f"{signature}\n    return 0"


def test_a_source_without_functions_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too few documented Python functions"):
        read_corpus(tmp_path)
