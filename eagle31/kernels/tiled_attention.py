"""Attention to the step-0 keys tile by tile, by PyTorch's flash kernel for the CPU or by matrix products."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from eagle31.kernels.elementwise import widened
from eagle31.kernels.query_run import QueryRun, tiles

# Queries per kernel call. Larger tiles make fewer calls, but compute more scores that the mask hides.
TILE = 128

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class FlashKernel:
    """Attention of one tile under an additive mask, by PyTorch's flash kernel for the CPU.

    It takes fewer key heads than query heads without repeating them. Values are as wide as keys.

    query: [1, Hq, n, D], key: [1, Hkv, s, D], value: [1, Hkv, s, Dv], mask: [n, s].
    """

    scale: float  # of the scores

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [1, Hq, n, Dv] and log-sum-exp [1, Hq, n]."""
        return _flash_forward(query, key, value, attn_mask=mask, scale=self.scale)

    def backward(self, *tensors: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of query, key and value, from the output's gradient, these three, output and lse."""
        return _flash_backward(*tensors, 0.0, False, attn_mask=mask, scale=self.scale)


@dataclass(frozen=True)
class PlainKernel:
    """The same by matrix products for any device, dtype and width of values; holds the scores of a tile."""

    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(query, key, mask)
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - lse).exp_().to(value.dtype)
        return (weights @ value.unsqueeze(2)).flatten(1, 2), lse.squeeze(-1).flatten(1, 2)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = self._scores(query, key, mask)
        groups = (key.shape[1], -1)
        weights = (scores - lse.unflatten(1, groups).unsqueeze(-1)).exp_()
        grouped = grad.unflatten(1, groups)
        delta = torch.linalg.vecdot(grad.to(weights.dtype), output.to(weights.dtype))
        slope = (grouped @ value.unsqueeze(2).mT).to(weights.dtype)
        slope = (slope - delta.unflatten(1, groups).unsqueeze(-1)) * weights * self.scale
        slope, weights = slope.to(query.dtype), weights.to(query.dtype)
        grad_key = (slope.mT @ query.unflatten(1, groups)).sum(2)
        return (slope @ key.unsqueeze(2)).flatten(1, 2), grad_key, (weights.mT @ grouped).sum(2)

    def _scores(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        """Return the scores [1, Hkv, group, n, s], float32 or wider."""
        scores = query.unflatten(1, (key.shape[1], -1)) @ key.unsqueeze(2).mT
        return scores.to(widened(scores.dtype)) * self.scale + mask


Kernel: TypeAlias = FlashKernel | PlainKernel


def tile_mask(longest: int, like: Tensor, window: int | None = None) -> Tensor:
    """Return an additive mask, of which the mask of every tile is a part, in the dtype and device of `like`.

    Args:
        longest: the most keys of a run.
        window: the number of keys that a query reads, its own included; None for all.

    Returns:
        [TILE, before + TILE]: query i reads keys up to before + i.
    """
    before = longest if window is None else min(longest, window - 1)
    every = torch.ones(TILE, before + TILE, dtype=torch.bool, device=like.device)
    hidden = every.triu(before + 1)
    if window is not None:
        hidden |= every.tril(before - window)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


class TiledBlock:
    """Attention of one step's queries to the step-0 keys: a kernel call for each tile of a run.

    A tile reads no key before the window of its first query.

    Args:
        mask: `tile_mask` of the window, the number of step-0 keys that a query reads; 0 needs none.
    """

    def __init__(
        self, runs: Sequence[QueryRun], mask: Tensor | None, window: int | None, kernel: Kernel
    ) -> None:
        self.kernel, self.scale = kernel, kernel.scale
        self.tiles = []
        if mask is None:
            return
        for tile in (one.within(window) for one in tiles(runs, TILE)):
            start = mask.shape[1] - TILE - (tile.num_keys - tile.num_queries)
            rows, seen = slice(tile.query_start, tile.query_stop), slice(tile.key_start, tile.key_stop)
            self.tiles.append((rows, seen, mask[: tile.num_queries, start : start + tile.num_keys]))

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [R, Hq, Dv] and log-sum-exp [R, Hq].

        query: [R, Hq, D], keys: [S, Hkv, D], values: [S, Hkv, Dv].
        """
        output = query.new_zeros(*query.shape[:2], values.shape[-1])
        lse = query.new_full(query.shape[:2], float("-inf"), dtype=widened(query.dtype))
        query, keys, values = _heads_first(query), _heads_first(keys), _heads_first(values)
        for rows, seen, mask in self.tiles:
            out, sums = self.kernel.forward(query[:, :, rows], keys[:, :, seen], values[:, :, seen], mask)
            output[rows] = out[0].transpose(0, 1)
            lse[rows] = sums[0].t()
        return output, lse

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
        """Return the query's gradient, and add those of keys and values to `sums`.

        Output and lse may be merged with other terms.
        """
        found = torch.zeros_like(query)
        grad_query, grad_keys, grad_values = (_heads_first(x) for x in (found, *sums))
        grad, query, output = _heads_first(grad), _heads_first(query), _heads_first(output)
        keys, values, lse = _heads_first(keys), _heads_first(values), lse.t().unsqueeze(0)
        for rows, seen, mask in self.tiles:
            dq, dk, dv = self.kernel.backward(
                grad[:, :, rows],
                query[:, :, rows],
                keys[:, :, seen],
                values[:, :, seen],
                output[:, :, rows],
                lse[:, :, rows],
                mask=mask,
            )
            grad_query[:, :, rows] = dq
            grad_keys[:, :, seen] += dk
            grad_values[:, :, seen] += dv
        return found


def _heads_first(x: Tensor) -> Tensor:
    """Return a view [1, H, N, D] of [N, H, D]."""
    return x.transpose(0, 1).unsqueeze(0)
