"""The input of one training step."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Several documents packed one after another into one row, and padding at its end.

    T tokens, A aux layers, Ht the target's hidden size. Padding has `document_ids` -1 and `loss_mask` false.
    """

    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T], true where the assistant wrote the token
    document_ids: Tensor  # int64 [T], 0, 1, 2, ... in order; -1 for padding
    position_ids: Tensor  # int64 [T], starts at 0 in every document and ascends
    aux_hidden_states: Tensor  # target dtype [T, A, Ht]
    final_hidden_states: Tensor  # target dtype [T, Ht], the last layer's output before the final norm

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "PackedBatch":
        """Return the batch on `device`, with hidden states cast to `dtype` when it is given."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        if dtype is not None:
            moved["aux_hidden_states"] = moved["aux_hidden_states"].to(dtype)
            moved["final_hidden_states"] = moved["final_hidden_states"].to(dtype)
        return PackedBatch(**moved)
