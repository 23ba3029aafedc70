"""The draft vocabulary: the target's tokens that the drafter can propose."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle31.errors import UserError


@dataclass(frozen=True)
class DraftVocab:
    """A selection of the target's tokens, in ascending order of their ids."""

    d2t: Tensor  # int64 [Vd], target_id = draft_id + d2t[draft_id]
    t2d: Tensor  # bool [V], true for tokens in the draft vocabulary
    coverage: float  # fraction of the occurrences that are in the draft vocabulary

    @property
    def target_ids(self) -> Tensor:
        """Return the target's id of each draft id, int64 [Vd]."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)


def build_draft_vocab(
    token_counts: Tensor, draft_vocab_size: int | None, special_token_ids: Iterable[int]
) -> DraftVocab:
    """Choose the special tokens and the most frequent others; ties go to the lower id.

    Args:
        token_counts: int64 [V], occurrences among the tokens that the loss mask selects.
        draft_vocab_size: at most V; None keeps the full vocabulary.

    Raises:
        UserError: the size leaves no room for other tokens than the special ones.
    """
    vocab_size = token_counts.shape[0]
    size = vocab_size if draft_vocab_size is None else draft_vocab_size
    special = sorted({i for i in special_token_ids if 0 <= i < vocab_size})
    if size <= len(special):
        remedy = f"It must be more than the {len(special)} special tokens."
        raise UserError("drafter.draft_vocab_size", draft_vocab_size, remedy)
    ranked = token_counts.clone()
    ranked[special] = torch.iinfo(torch.int64).max
    chosen = torch.sort(ranked, descending=True, stable=True).indices[:size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return DraftVocab(chosen - torch.arange(size), t2d, coverage(token_counts, t2d))


def coverage(token_counts: Tensor, t2d: Tensor) -> float:
    """Return the fraction of the occurrences that are in the draft vocabulary. int64 [V], bool [V]."""
    total = int(token_counts.sum())
    return int(token_counts[t2d].sum()) / total if total else 1.0
