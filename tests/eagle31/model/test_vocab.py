import pytest
import torch

from eagle31.errors import UserError
from eagle31.model.vocab import build_draft_vocab


def test_keeps_the_frequent_and_the_special() -> None:
    counts = torch.tensor([5, 0, 9, 1, 0, 7, 0])
    vocab = build_draft_vocab(counts, 4, special_token_ids=[6, 7])  # one is after the vocabulary
    assert vocab.target_ids.tolist() == [0, 2, 5, 6]
    assert vocab.d2t.tolist() == [0, 1, 3, 3]
    assert vocab.t2d.nonzero().squeeze(1).tolist() == [0, 2, 5, 6]
    assert vocab.coverage == 21 / 22


def test_ties_go_to_the_lower_id() -> None:
    assert build_draft_vocab(torch.ones(6, dtype=torch.long), 3, []).target_ids.tolist() == [0, 1, 2]


def test_null_is_the_full_vocabulary() -> None:
    vocab = build_draft_vocab(torch.zeros(5, dtype=torch.long), None, [1])
    assert vocab.d2t.tolist() == [0] * 5
    assert vocab.t2d.all()
    assert vocab.coverage == 1.0


def test_a_size_without_room_for_other_than_special_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="draft_vocab_size"):
        build_draft_vocab(torch.ones(5, dtype=torch.long), 2, special_token_ids=[0, 1])
