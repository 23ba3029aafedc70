"""What passes from the target to training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class CapturedSample:
    """One conversation and what the target thought of it: T tokens, A aux layers, Ht the hidden size."""

    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]
    aux_hidden_states: Tensor  # target dtype [T, A, Ht]
    final_hidden_states: Tensor  # target dtype [T, Ht], before the final norm


class HiddenStateSource(Protocol):
    """What training reads: a store on disk, or the target itself."""

    @property
    def lengths(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> CapturedSample: ...
    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]: ...
