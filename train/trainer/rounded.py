"""A drafter that computes with its float32 weights rounded to another dtype."""

import copy

import torch
from torch import nn

from eagle31.model.drafter import Drafter


class RoundedDrafter:
    """Rounds a drafter's float32 weights for a forward pass; their gradients accumulate in float32.

    DeepSpeed accumulates in bf16 at ZeRO 0 in bf16, and keeps the float32 weights to itself. So there the
    model engine has the float32 weights, and this rounds them.
    """

    def __init__(self, drafter: Drafter) -> None:
        shared = {id(weight): weight for weight in drafter.parameters()}
        self._rounded = copy.deepcopy(drafter, shared)  # copies the modules, whose weights are replaced
        self._weights: list[tuple[nn.Module, nn.Module, str]] = []
        for source, module in zip(drafter.modules(), self._rounded.modules(), strict=True):
            for name in [name for name, weight in source._parameters.items() if weight is not None]:
                del module._parameters[name]
                self._weights.append((source, module, name))

    def __call__(self, dtype: torch.dtype) -> Drafter:
        """Return the drafter with weights of this dtype, which it keeps until the next call.

        They outlive the forward pass, because activation checkpointing reads them again in the backward pass.
        """
        for source, module, name in self._weights:
            setattr(module, name, getattr(source, name).to(dtype))
        return self._rounded

    def release(self) -> None:
        """Free the rounded weights."""
        for _, module, name in self._weights:
            setattr(module, name, None)
