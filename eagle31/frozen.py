"""What a drafter uses and never trains."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FrozenParts:
    """Kept outside the trained module, so that no optimizer, shard or checkpoint holds them."""

    embed_tokens: Tensor  # [V, H], the target's, or its projection where the widths differ
    target_head: Callable[[Tensor], Tensor]  # [N, Ht] before the final norm -> logits [N, V]
    draft_target_ids: Tensor | None  # int64 [Vd]; None for the full vocabulary
    lm_head: nn.Linear | None  # the draft head when it is not trained


def project_width(rows: Tensor, width: int) -> Tensor:
    """Brings embedding rows to another width, keeping their inner products as well as can be.

    A narrower width takes the leading principal directions, a wider one pads with zeros.

    Args:
        rows: [V, Ht].

    Returns:
        [V, width] in the dtype of `rows`.
    """
    own = rows.shape[1]
    if width == own:
        return rows
    if width > own:
        return torch.nn.functional.pad(rows, (0, width - own))
    wide = rows.float()
    _, directions = torch.linalg.eigh(wide.T @ wide)  # ascending eigenvalues
    return (wide @ directions[:, -width:].flip(1)).to(rows.dtype)
