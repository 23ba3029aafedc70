"""The parts that a drafter uses and does not train."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn


class FrozenHead(Protocol):
    """The target's head, with its final norm: [N, Ht] -> logits [N, V]."""

    def __call__(self, hidden: Tensor, /) -> Tensor: ...

    def rows(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the head of these tokens alone. token_ids: int64 [Vd], ascending."""


@dataclass(frozen=True)
class FrozenParts:
    """Parts kept outside the trained module, so that no optimizer, shard or checkpoint holds them."""

    embed_tokens: Tensor  # [V, H], the target's, or its projection where the widths differ
    target_head: FrozenHead  # of states before the final norm
    draft_target_ids: Tensor | None  # int64 [Vd]; None for the full vocabulary
    lm_head: nn.Linear | None  # the draft head when it is not trained

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids of tokens of the draft vocabulary, int64 of any shape."""
        return draft_ids if self.draft_target_ids is None else self.draft_target_ids[draft_ids]

    @cached_property
    def draft_logits(self) -> Callable[[Tensor], Tensor]:
        """Return the target's head over the draft vocabulary alone: [N, Ht] -> [N, Vd]."""
        ids, head = self.draft_target_ids, self.target_head
        return head if ids is None else head.rows(ids)


def project_width(rows: Tensor, width: int) -> Tensor:
    """Project embedding rows to another width, preserving their inner products as well as possible.

    A narrower width takes the leading principal directions, a wider one pads with zeros.

    Args:
        rows: [V, Ht].

    Returns:
        [V, width] in the dtype of `rows`.
    """
    current = rows.shape[1]
    if width == current:
        return rows
    if width > current:
        return torch.nn.functional.pad(rows, (0, width - current))
    wide = rows.float()
    _, directions = torch.linalg.eigh(wide.T @ wide)  # ascending eigenvalues
    return (wide @ directions[:, -width:].flip(1)).to(rows.dtype)
