"""Exact attention of a rollout step by merging log-sum-exps, without a matrix of scores.

A query reads the step-0 keys of its document up to its own row, and its row's rollout keys, those of later
steps. A flash kernel computes the first part, and its log-sum-exp is merged with the few rollout scores. In
the backward pass the kernel is given the merged output and the merged log-sum-exp. It then recomputes exactly
the probabilities that the step-0 keys have in the full softmax, so its gradients are exact too. The rollout
terms are elementwise.

Source: the merging is ring attention's (arXiv 2310.01889); the kernel is FlashAttention-2 (arXiv 2307.08691).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle31.kernels.elementwise import widened
from eagle31.kernels.packed_steps import PackedContext
from eagle31.kernels.plain_attention import LayerKeys
from eagle31.kernels.tiled_attention import TiledBlock


class _MergedAttention(torch.autograd.Function):
    """The tensor inputs are query, keys, values, then the rollout keys and values of steps 1..k."""

    @staticmethod
    def forward(
        ctx: Any,
        block: TiledBlock | PackedContext,
        row_indices: Sequence[Tensor | None],
        sums: tuple[Tensor, Tensor] | None,
        *tensors: Tensor,
    ) -> Tensor:
        query, keys, values, *rollout = tensors
        num_steps = len(rollout) // 2
        rollout = [_select(x, row_indices[i % num_steps]) for i, x in enumerate(rollout)]
        output, lse = block.forward(query, keys, values)
        if num_steps:
            halves = rollout[:num_steps], rollout[num_steps:]
            output, lse = _merge(output, lse, query, *halves, block.scale)
        ctx.block, ctx.row_indices, ctx.sums = block, row_indices, sums
        ctx.save_for_backward(output, lse, *tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, lse, query, keys, values, *rollout = ctx.saved_tensors
        grad = grad.contiguous()
        sums = ctx.sums or tuple(torch.zeros_like(x, dtype=widened(x.dtype)) for x in (keys, values))
        grad_query = ctx.block.backward(grad, query, keys, values, output, lse, sums)
        of_keys = (None, None) if ctx.sums else (x.to(keys.dtype) for x in sums)
        num_steps = len(rollout) // 2
        gradients: list[Tensor] = []
        if num_steps:
            selected = [_select(x, ctx.row_indices[i % num_steps]) for i, x in enumerate(rollout)]
            halves, scale = (selected[:num_steps], selected[num_steps:]), ctx.block.scale
            grad_query, gradients = _rollout_backward(grad, query, *halves, output, lse, grad_query, scale)
            gradients = [
                _scatter(x, ctx.row_indices[i % num_steps], rollout[i]) for i, x in enumerate(gradients)
            ]
        return None, None, None, grad_query, *of_keys, *gradients


def merged_attention(block: TiledBlock | PackedContext, query: Tensor, keys: LayerKeys) -> Tensor:
    """Attend to the step-0 keys that the block makes visible and to each row's rollout keys of steps 1..k.

    Args:
        query: [R, Hq, D], rotated.

    Returns:
        [R, Hq, Dv] in the query's dtype; the softmax is float32 or wider.
    """
    rollout = (*keys.rollout_keys, *keys.rollout_values)
    return _MergedAttention.apply(block, keys.row_indices, keys.sums, query, keys.keys, keys.values, *rollout)


def _select(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


def _scatter(grad: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    grad = grad.to(like.dtype)
    return grad if index is None else torch.zeros_like(like).index_copy_(0, index, grad)


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """Reshape [R, Hq, D] to [R, Hkv, group, D], in float32 or wider."""
    return x.to(widened(x.dtype)).unflatten(1, (num_kv_heads, -1))


def _rollout_scores(query: Tensor, rollout_keys: Sequence[Tensor], scale: float) -> Tensor:
    """Return the scaled scores [R, Hq, k]."""
    grouped = _grouped(query, rollout_keys[0].shape[1])
    scores = [torch.linalg.vecdot(grouped, key.to(grouped.dtype).unsqueeze(2)) for key in rollout_keys]
    return torch.stack(scores, dim=-1).flatten(1, 2).mul_(scale)


def _merge(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    rollout_keys: Sequence[Tensor],
    rollout_values: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Add the rollout terms to the block's output and log-sum-exp."""
    scores = _rollout_scores(query, rollout_keys, scale)
    lse = lse.to(scores.dtype)
    merged_lse = torch.cat((lse.unsqueeze(-1), scores), dim=-1).logsumexp(-1)
    num_kv_heads = rollout_values[0].shape[1]
    weights = (scores - merged_lse.unsqueeze(-1)).exp_().unflatten(1, (num_kv_heads, -1))
    merged = _grouped(output, num_kv_heads) * (lse - merged_lse).exp_().unflatten(
        1, (num_kv_heads, -1)
    ).unsqueeze(-1)
    for step, value in enumerate(rollout_values):
        merged.addcmul_(weights[..., step, None], value.to(merged.dtype).unsqueeze(2))
    return merged.flatten(1, 2).to(output.dtype), merged_lse


def _rollout_backward(
    grad: Tensor,
    query: Tensor,
    rollout_keys: Sequence[Tensor],
    rollout_values: Sequence[Tensor],
    output: Tensor,
    lse: Tensor,
    grad_query: Tensor,
    scale: float,
) -> tuple[Tensor, list[Tensor]]:
    """Return the query's gradient with the rollout terms added, and those of rollout keys and values."""
    num_kv_heads = rollout_keys[0].shape[1]
    wide_query, wide_grad = _grouped(query, num_kv_heads), _grouped(grad, num_kv_heads)
    weights = (
        (_rollout_scores(query, rollout_keys, scale) - lse.unsqueeze(-1))
        .exp_()
        .unflatten(1, (num_kv_heads, -1))
    )
    delta = torch.linalg.vecdot(wide_grad, _grouped(output, num_kv_heads))
    total = _grouped(grad_query, num_kv_heads)
    grad_keys, grad_values = [], []
    for step, (key, value) in enumerate(zip(rollout_keys, rollout_values, strict=True)):
        weight = weights[..., step]
        along = torch.linalg.vecdot(wide_grad, value.to(wide_grad.dtype).unsqueeze(2))
        slope = (along.sub_(delta).mul_(weight).mul_(scale)).unsqueeze(-1)
        total = torch.addcmul(total, slope, key.to(total.dtype).unsqueeze(2))
        grad_keys.append((slope * wide_query).sum(2))
        grad_values.append((weight.unsqueeze(-1) * wide_grad).sum(2))
    return total.flatten(1, 2).to(query.dtype), grad_keys + grad_values
