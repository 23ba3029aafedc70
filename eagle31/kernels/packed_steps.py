"""Exact attention of a rollout step on a GPU: the flash kernel, and the rollout terms merged in.

It computes what `merged_attention` does, whose docstring has the mathematics. Nothing is gathered: the steps
of a chunk share one buffer of rollout keys and values, and one of their gradients, which each step's backward
pass adds to. Each gradient is returned once, after the last step that reads its key.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle31.kernels.elementwise import widened
from eagle31.kernels.packed_attention import PackedBlock, padded_head_dim, padded_value_dim


class _Sums:
    """The gradients of a layer's keys and values, made when the backward pass begins."""

    def __init__(self, keys: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        self._shapes = keys.shape, values.shape
        self._dtype, self._device = dtype, keys.device
        self._tensors: tuple[Tensor, Tensor] | None = None

    def tensors(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            key, value = (torch.zeros(x, dtype=self._dtype, device=self._device) for x in self._shapes)
            self._tensors = key, value
        return self._tensors


class PackedKeys:
    """A layer's keys and values that the steps of a chunk read, and the sums of their gradients.

    Args:
        keys: [S, Hkv, D] of step 0, rotated.
        values: [S, Hkv, Dv] of step 0; Dv may be less than D.
        num_steps: later steps, whose keys and values follow.
        num_rows: rows of step 0.
        sums: float32 or wider, in the shapes of keys and values: the backward pass adds their gradients here
            instead of returning them.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        num_steps: int = 0,
        num_rows: int = 0,
        sums: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.value_width = values.shape[-1]
        widths = padded_head_dim(keys.shape[-1]), padded_value_dim(keys.shape[-1], self.value_width)
        tensors = zip((keys, values), widths, strict=True)
        self.context = [_widen(x.detach().contiguous(), width) for x, width in tensors]
        # Those of later steps, at the rows of step 0.
        slots = [x.new_empty(num_steps, num_rows, *x.shape[1:]) for x in (keys, values)]
        self.slots, self.slot_sums = slots, _Sums(slots[0], slots[1], keys.dtype)
        context_sums = _Sums(keys, values, widened(keys.dtype))
        self.context_sums = context_sums.tensors if sums is None else lambda: sums
        # Every step's result depends on it, so that its gradient comes after theirs.
        self.returned = _Returned.apply(context_sums, keys, values) if sums is None else keys.new_empty(0)


class _Returned(torch.autograd.Function):
    """The edge through which the sums become the gradients of step 0's keys and values."""

    @staticmethod
    def forward(ctx: Any, sums: _Sums, keys: Tensor, values: Tensor) -> Tensor:
        ctx.sums, ctx.dtype = sums, keys.dtype
        return keys.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(x.to(ctx.dtype) for x in ctx.sums.tensors())


class _PackedAttention(torch.autograd.Function):
    """The tensor inputs are the query, what `PackedKeys.returned` is, and the step's own key and value."""

    @staticmethod
    def forward(
        ctx: Any,
        block: PackedBlock,
        keys: PackedKeys,
        query: Tensor,
        _: Tensor,
        *own: Tensor,
    ) -> Tensor:
        from eagle31.kernels.rollout_terms import merge_rollout, spread_rows

        (spread,) = spread_rows([query.contiguous()], block.sources, padded_head_dim(query.shape[-1]))
        found = block.forward(spread, *keys.context) if block.calls else None
        if own:
            output, lse = merge_rollout(block, found, spread, own, keys.slots)
        elif found:
            output, lse = _select(found[0][..., : keys.value_width], block.places), found[1]
        else:
            output, lse = query.new_zeros(*query.shape[:2], keys.value_width), None
        ctx.block, ctx.keys, ctx.has_own, ctx.width = block, keys, bool(own), query.shape[-1]
        ctx.save_for_backward(spread, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from eagle31.kernels.rollout_terms import rollout_backward, spread_rows

        spread, output, lse = ctx.saved_tensors
        block, keys, grad = ctx.block, ctx.keys, grad.contiguous()
        grad_query = None
        if block.calls:
            width = keys.context[1].shape[-1]
            wide_grad, wide_output = spread_rows((grad, output), block.sources, width)
            grad_query = block.backward(
                wide_grad, spread, *keys.context, wide_output, lse, keys.context_sums()
            )
        if ctx.has_own:
            gradients = rollout_backward(
                block, grad, spread, output, lse, keys.slots, keys.slot_sums.tensors(), grad_query
            )
            return None, None, gradients[0], None, *gradients[1:]
        if grad_query is None:
            return None, None, torch.zeros_like(spread[..., : ctx.width]), None
        return None, None, _select(grad_query[..., : ctx.width], block.places), None


def packed_attention(block: PackedBlock, keys: PackedKeys, query: Tensor, *own: Tensor) -> Tensor:
    """Attend to the step-0 keys that the block makes visible and to each row's rollout keys.

    The steps are called in their order, each once.

    Args:
        query: [R, Hq, D], rotated.
        own: the step's rollout keys [R, Hkv, D] and values [R, Hkv, Dv]; none at step 0.

    Returns:
        [R, Hq, Dv] in the query's dtype; the softmax is float32.
    """
    return _PackedAttention.apply(block, keys, query, keys.returned, *own)


class PackedContext:
    """A `PackedBlock` of queries that read step-0 keys alone, with the results of `TiledBlock`."""

    def __init__(self, block: PackedBlock) -> None:
        self.block, self.scale = block, block.scale

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [R, Hq, D] and log-sum-exp [R, Hq]; values are as wide as keys."""
        if not self.block.calls:
            lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
            return torch.zeros_like(query), lse
        (spread,) = self._spread([query])
        output, lse = self.block.forward(spread, *self._widened(keys, values))
        places = self.block.places
        return _select(output[..., : query.shape[-1]], places), _select(lse.t(), places)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        lse: Tensor,
        sums: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return the query's gradient, and add those of keys and values to `sums`."""
        if not self.block.calls:
            return torch.zeros_like(query)
        (wide_grad, wide_output), (spread,) = self._spread([grad, output]), self._spread([query])
        placed = lse.t()
        if self.block.places is not None:
            placed = lse.new_zeros(lse.shape[1], len(spread)).index_copy_(1, self.block.places, placed)
        wide = self._widened(keys, values)
        found = self.block.backward(wide_grad, spread, *wide, wide_output, placed, sums)
        return _select(found[..., : query.shape[-1]], self.block.places)

    def _spread(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        from eagle31.kernels.rollout_terms import spread_rows

        width = padded_head_dim(tensors[0].shape[-1])
        return spread_rows([x.contiguous() for x in tensors], self.block.sources, width)

    @staticmethod
    def _widened(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        width = padded_head_dim(keys.shape[-1])
        return _widen(keys.contiguous(), width), _widen(values.contiguous(), width)


def _select(x: Tensor, index: Tensor | None) -> Tensor:
    return x.contiguous() if index is None else x.index_select(0, index)


def _widen(x: Tensor, width: int) -> Tensor:
    """Pad the last dimension of `x` with zeros."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x
