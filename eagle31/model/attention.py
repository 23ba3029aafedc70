"""The keys and values that a rollout reads, and attention to them by its definition.

The definition builds the scores. Decoding uses it, whose queries are few, and so does the plain reference of
the training step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle31.kernels.query_run import QueryRun, context_window


@dataclass(frozen=True)
class LayerKeys:
    """One layer's rotated keys and values: of step 0, and of the rows that are rolled out at later steps."""

    keys: Tensor  # [S, Hkv, D]
    values: Tensor  # [S, Hkv, Dv]
    rollout_keys: tuple[Tensor, ...] = ()  # [R_i, Hkv, D] of steps i = 1..k
    rollout_values: tuple[Tensor, ...] = ()  # [R_i, Hkv, Dv]
    # int64 [R], the current rows within the rows of each of these steps; None where they are the same rows.
    row_indices: tuple[Tensor | None, ...] = ()

    def with_step(self, keys: Tensor, values: Tensor) -> "LayerKeys":
        """Return these and the keys and values of one more step, at the current rows."""
        return LayerKeys(
            self.keys,
            self.values,
            (*self.rollout_keys, keys),
            (*self.rollout_values, values),
            (*self.row_indices, None),
        )

    def for_rows(self, index: Tensor) -> "LayerKeys":
        """Return these for some of the current rows, int64 [R]."""
        indices = (index if before is None else before[index] for before in self.row_indices)
        return replace(self, row_indices=tuple(indices))

    def within(self, window: int | None) -> "LayerKeys":
        """Return these without the rollout keys that are outside of the current step's window.

        Args:
            window: the number of positions that a query reads, its own included; None keeps all keys.
        """
        if window is None or window >= len(self.rollout_keys):
            return self
        kept = slice(-window, None)
        return replace(
            self,
            rollout_keys=self.rollout_keys[kept],
            rollout_values=self.rollout_values[kept],
            row_indices=self.row_indices[kept],
        )


Attend = Callable[[Tensor, LayerKeys], Tensor]  # query [R, Hq, D] -> [R, Hq, Dv]


def attend_by_run(
    query: Tensor, keys: LayerKeys, runs: Sequence[QueryRun], scale: float, window: int | None = None
) -> Tensor:
    """Apply `rollout_attention` to each run and the keys that it may read.

    A packed row thus costs what its documents cost.

    Args:
        query: [R, Hq, D], rotated.
        runs: the R queries.
        scale: multiplies the scores.
        window: the number of positions that a query reads, its own included; None for all.

    Returns:
        [R, Hq, Dv] in the query's dtype.
    """
    if not runs:
        return query.new_zeros(*query.shape[:2], keys.values.shape[-1])
    context = context_window(window, len(keys.rollout_keys))
    keys = keys.within(window)
    rollout_keys = _current_rows(keys.rollout_keys, keys.row_indices)
    rollout_values = _current_rows(keys.rollout_values, keys.row_indices)
    parts = []
    for full_run in runs:
        run = full_run.within(context)
        queries = slice(run.query_start, run.query_stop)
        visible = None if run.num_queries == 1 else _visible(run, context, query.device)
        parts.append(
            rollout_attention(
                query[queries],
                keys.keys[run.key_start : run.key_stop],
                keys.values[run.key_start : run.key_stop],
                visible,
                [key[queries] for key in rollout_keys],
                [value[queries] for value in rollout_values],
                scale,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rollout_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    rollout_keys: Sequence[Tensor],
    rollout_values: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Attend to the visible step-0 keys and to each row's rollout keys of steps 1..k.

    Args:
        query: [R, Hq, D], rotated.
        keys: [S, Hkv, D] of step 0, rotated.
        values: [S, Hkv, Dv] of step 0.
        visible: bool [R, S]; None makes every key visible.
        rollout_keys, rollout_values: k tensors [R, Hkv, D] and [R, Hkv, Dv] of steps 1..k.
        scale: multiplies the scores.

    Returns:
        [R, Hq, Dv] in the query's dtype. Scores and softmax are float32 or wider.
    """
    weights = attention_weights(query, keys, visible, rollout_keys, scale).to(query.dtype)
    return weighted_values(weights, values, rollout_values)


def attention_weights(
    query: Tensor, keys: Tensor, visible: Tensor | None, rollout_keys: Sequence[Tensor], scale: float
) -> Tensor:
    """Return what `rollout_attention` multiplies the values by.

    Returns:
        [Hkv, group, R, S + k], float32 or wider: the weights of step 0's keys, then those of steps 1..k.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    # shape: [Hkv, group, R, D]
    grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = (grouped @ keys.permute(1, 2, 0).unsqueeze(1)).to(wide)  # shape: [Hkv, group, R, S]
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    # shape: [Hkv, group, R, k]
    rollout = [(grouped * key.permute(1, 0, 2).unsqueeze(1)).sum(-1, dtype=wide) for key in rollout_keys]
    if rollout:
        scores = torch.cat((scores, torch.stack(rollout, dim=-1)), dim=-1)
    return (scores * scale).softmax(dim=-1)


def weighted_values(weights: Tensor, values: Tensor, rollout_values: Sequence[Tensor]) -> Tensor:
    """Return the sums of the values. [Hkv, group, R, S + k] -> [R, Hq, Dv]."""
    num_kv_heads, group, num_rows, _ = weights.shape
    num_keys = values.shape[0]
    out = weights[..., :num_keys] @ values.permute(1, 0, 2).unsqueeze(1)
    for step, value in enumerate(rollout_values):
        out = out + weights[..., num_keys + step, None] * value.permute(1, 0, 2).unsqueeze(1)
    return out.permute(2, 0, 1, 3).reshape(num_rows, num_kv_heads * group, values.shape[-1])


def _visible(run: QueryRun, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask of a run, bool [queries, keys]."""
    mask = torch.ones(run.num_queries, run.num_keys, dtype=torch.bool, device=device)
    last = run.num_keys - run.num_queries
    mask.tril_(last)
    return mask if window is None else mask.triu_(last - (window - 1))


def _current_rows(steps: Sequence[Tensor], indices: Sequence[Tensor | None]) -> list[Tensor]:
    return [x if index is None else x[index] for x, index in zip(steps, indices, strict=True)]
