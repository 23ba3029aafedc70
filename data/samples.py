"""Captured samples, which pass from the target to training, and the protocol of their sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class CapturedSample:
    """One conversation with the target's hidden states: T tokens, A aux layers, hidden size Ht."""

    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]
    aux_hidden_states: Tensor  # target dtype [T, A, Ht]
    final_hidden_states: Tensor  # target dtype [T, Ht], before the final norm


@dataclass(frozen=True)
class StateShape:
    """The shape and dtype of a token's states, as training reads them."""

    num_aux_layers: int
    hidden_size: int
    dtype: torch.dtype

    @staticmethod
    def of(aux_hidden_states: Tensor, dtype: torch.dtype | None = None) -> "StateShape":
        """Return the shape of states [T, A, Ht] with their dtype or another."""
        _, num_layers, hidden_size = aux_hidden_states.shape
        return StateShape(num_layers, hidden_size, dtype or aux_hidden_states.dtype)


class HiddenStateSource(Protocol):
    """A sequence of captured samples that training reads: a store on disk, or the running target."""

    @property
    def lengths(self) -> Sequence[int] | NDArray[np.int64]: ...
    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]: ...
