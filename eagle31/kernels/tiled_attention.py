"""The causal block tile by tile: PyTorch's flash kernel for the CPU, or plain matrix products anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle31.kernels.elementwise import widened
from eagle31.kernels.query_run import QueryRun

# Queries of one kernel call. More make fewer calls, but more of the masked triangle is computed in vain.
TILE = 128

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Kernel(Protocol):
    """Attention of query [1, Hq, n, D] to keys [1, Hkv, s, D] and values [1, Hkv, s, Dv] under an additive
    mask [n, s].
    """

    @property
    def scale(self) -> float:
        """Of the scores."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Output [1, Hq, n, Dv] and log-sum-exp [1, Hq, n]."""

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
        """Gradients of query, key and value."""


@dataclass(frozen=True)
class FlashKernel:
    """For the CPU; it takes fewer key heads than query heads as they are. Values are as wide as keys."""

    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return _flash_forward(query, key, value, attn_mask=mask, scale=self.scale)

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
        return _flash_backward(
            grad, query, key, value, output, lse, 0.0, False, attn_mask=mask, scale=self.scale
        )


@dataclass(frozen=True)
class PlainKernel:
    """Any device, dtype and width of values; holds the scores of one tile."""

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
        """[1, Hkv, group, n, s], float32 or wider."""
        scores = query.unflatten(1, (key.shape[1], -1)) @ key.unsqueeze(2).mT
        return scores.to(widened(scores.dtype)) * self.scale + mask


@dataclass(frozen=True)
class Tiles:
    """Additive masks of all tiles: each is a window of one."""

    mask: Tensor  # [TILE, longest + TILE]: query i reads the keys up to longest + i

    @staticmethod
    def for_keys(longest: int, like: Tensor) -> "Tiles":
        """For runs of at most `longest` keys, in the dtype and on the device of `like`."""
        hidden = torch.ones(TILE, longest + TILE, dtype=torch.bool, device=like.device).triu_(longest + 1)
        return Tiles(like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf")))

    def window(self, num_queries: int, num_keys: int) -> Tensor:
        """[num_queries, num_keys], for queries that are the last rows of their keys."""
        start = self.mask.shape[1] - TILE - (num_keys - num_queries)
        return self.mask[:num_queries, start : start + num_keys]


class TiledBlock:
    """Runs cut into tiles of queries, one kernel call each."""

    def __init__(self, runs: Sequence[QueryRun], tiles: Tiles, kernel: Kernel) -> None:
        self.kernel = kernel
        self.scale = kernel.scale
        self.tiles = [
            (
                slice(tile.query_start, tile.query_stop),
                slice(tile.key_start, tile.key_stop),
                tiles.window(tile.query_stop - tile.query_start, tile.key_stop - tile.key_start),
            )
            for run in runs
            for tile in _tiles_of(run)
        ]

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        output = query.new_empty(*query.shape[:2], values.shape[-1])
        lse = query.new_empty(query.shape[:2], dtype=widened(query.dtype))
        query, keys, values = _heads_first(query), _heads_first(keys), _heads_first(values)
        for own, seen, mask in self.tiles:
            out, sums = self.kernel.forward(query[:, :, own], keys[:, :, seen], values[:, :, seen], mask)
            output[own] = out[0].transpose(0, 1)
            lse[own] = sums[0].t()
        return output, lse

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.empty_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        grad_query, grad_keys, grad_values = (_heads_first(x) for x in grads)
        grad, query, output = _heads_first(grad), _heads_first(query), _heads_first(output)
        keys, values, lse = _heads_first(keys), _heads_first(values), lse.t().unsqueeze(0)
        for own, seen, mask in self.tiles:
            dq, dk, dv = self.kernel.backward(
                grad[:, :, own],
                query[:, :, own],
                keys[:, :, seen],
                values[:, :, seen],
                output[:, :, own],
                lse[:, :, own],
                mask,
            )
            grad_query[:, :, own] = dq
            grad_keys[:, :, seen] += dk
            grad_values[:, :, seen] += dv
        return grads


def _heads_first(x: Tensor) -> Tensor:
    """[N, H, D] -> [1, H, N, D], a view."""
    return x.transpose(0, 1).unsqueeze(0)


def _tiles_of(run: QueryRun) -> list[QueryRun]:
    tiles = []
    for start in range(run.query_start, run.query_stop, TILE):
        stop = min(start + TILE, run.query_stop)
        tiles.append(QueryRun(start, stop, run.key_start, run.key_stop - (run.query_stop - stop)))
    return tiles
