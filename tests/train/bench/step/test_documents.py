import json
from pathlib import Path

import pytest
import torch

from eagle31.errors import UserError
from train.bench.step.documents import packed_rows, read_documents, synthetic_documents
from train.bench.step.inputs import random_batch
from train.bench.step.shapes import SHAPES, memory_shape


def test_mask_covers_the_answer_and_its_end(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"question": "How many?", "answer": "Twelve apples."}) + "\n")
    (chat,) = read_documents(file, vocab_size=100)
    # Three tokens before each turn and two after it: How, many, ?; Twelve, apples, full stop.
    assert len(chat.input_ids) == 3 + 3 + 2 + 3 + 3 + 2
    assert chat.loss_mask.nonzero().squeeze(1).tolist() == [11, 12, 13, 14]
    assert int(chat.input_ids.max()) < 100


def test_equal_words_have_equal_tokens(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"question": "of cats", "answer": "and of dogs"}) + "\n")
    (chat,) = read_documents(file, vocab_size=10_000)
    question, answer = chat.input_ids[3:5], chat.input_ids[10:13]
    assert question[0] != answer[1]  # " of" inside a sentence has its space
    assert len(set(chat.input_ids[chat.loss_mask][:-1].tolist())) == 3


@pytest.mark.parametrize("line", ["{}", "no json", '{"question": "a", "answer": 3}'])
def test_file_in_another_format_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UserError, match="Line 1"):
        read_documents(file, vocab_size=100)


def test_synthetic_lengths_match_gsm8k() -> None:
    chats = synthetic_documents(vocab_size=100)
    answers = torch.tensor([float(chat.loss_mask.sum()) - 1 for chat in chats])
    lengths = torch.tensor([float(len(chat.input_ids)) for chat in chats])
    questions = lengths - answers - 10
    assert questions.mean() == pytest.approx(56.9, rel=0.05)
    assert answers.mean() == pytest.approx(116.8, rel=0.05)
    joint = torch.corrcoef(torch.stack((questions.log(), answers.log())))[0, 1]
    assert joint == pytest.approx(0.55, abs=0.06)


def test_rows_match_their_shapes() -> None:
    num_supervised = {}
    for name, shape in SHAPES.items():
        rows, source = packed_rows(shape, 2, None)
        assert len(rows) == 2
        assert source
        for row in rows:
            assert sum(len(chat.input_ids) for chat in row) <= shape.row_tokens
        num_supervised[name] = sum(int(chat.loss_mask.sum()) for chat in rows[0])
    assert sum(len(chat.input_ids) for chat in packed_rows(SHAPES["A"], 1, None)[0][0]) >= 0.98 * 2048
    assert 0.5 * 2048 < num_supervised["A"] < 0.75 * 2048
    assert num_supervised["B"] == 256
    assert num_supervised["C"] == 512
    (long,) = packed_rows(memory_shape(1024, 4, 8192), 1, None)[0]
    assert len(long) == 1
    assert int(long[0].loss_mask.sum()) == 512


def test_hidden_states_are_reproducible() -> None:
    shape = SHAPES["C"]
    rows, _ = packed_rows(shape, 1, None)
    one, two = (random_batch(shape, rows[0], torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one.aux_hidden_states, two.aux_hidden_states)
    assert one.final_hidden_states.shape == (512, shape.hidden_size)
