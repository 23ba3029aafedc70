"""The keys and values of a layer, and attention to them by its definition.

The definition builds the scores. Decoding uses it, whose queries are few, and so does the measurement of
drift.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle31.kernels.packed_steps import PackedKeys
from eagle31.kernels.query_run import QueryRun, context_window, tiles


@dataclass(frozen=True)
class LayerKeys:
    """One layer's rotated keys and values: of step 0, and of the rows that are rolled out at later steps."""

    keys: Tensor  # [S, Hkv, D]
    values: Tensor  # [S, Hkv, Dv]
    rollout_keys: tuple[Tensor, ...] = ()  # [R_i, Hkv, D] of steps i = 1..k
    rollout_values: tuple[Tensor, ...] = ()  # [R_i, Hkv, Dv]
    # int64 [R], the current rows within the rows of each of these steps; None where they are the same rows.
    row_indices: tuple[Tensor | None, ...] = ()
    # Where the backward pass adds the gradients of step 0's keys and values; None: it returns them.
    sums: tuple[Tensor, Tensor] | None = None
    # Where the flash kernel for CUDA computes: all of these, apart from the last step's.
    packed: PackedKeys | None = None

    def with_step(self, keys: Tensor, values: Tensor) -> "LayerKeys":
        """Return these and the keys and values of one more step, at the current rows."""
        if self.packed is not None:
            return replace(self, rollout_keys=(keys,), rollout_values=(values,))
        return replace(
            self,
            rollout_keys=(*self.rollout_keys, keys),
            rollout_values=(*self.rollout_values, values),
            row_indices=(*self.row_indices, None),
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


MAX_SCORES = 2**23  # that are held at once
Attend = Callable[[Tensor, LayerKeys], Tensor]  # query [R, Hq, D] -> [R, Hq, Dv]
Note = Callable[[Tensor, int, bool], None]


def attend_by_run(
    query: Tensor,
    keys: LayerKeys,
    runs: Sequence[QueryRun],
    scale: float,
    window: int | None = None,
    note: Note | None = None,
) -> Tensor:
    """Attend from each run to the keys that it may read, with at most `MAX_SCORES` at a time.

    A packed row thus costs what its documents cost.

    Args:
        query: [R, Hq, D], rotated.
        keys: those of later steps are at the queries' rows.
        runs: the R queries.
        scale: multiplies the scores.
        window: the number of positions that a query reads, its own included; None for all.
        note: takes the `attention_weights` of some queries after others, the number of step-0 keys that these
            are about, and whether the document's first key is among those.

    Returns:
        [R, Hq, Dv] in the query's dtype. Scores and softmax are float32 or wider.
    """
    context = context_window(window, len(keys.rollout_keys))
    keys = keys.within(window)
    parts = [query.new_empty(0, query.shape[1], keys.values.shape[-1])]
    most_rows = MAX_SCORES // query.shape[1]
    for tile in (one for run in runs for one in tiles([run], max(most_rows // run.num_keys, 1))):
        run = tile.within(context)
        queries, seen = slice(run.query_start, run.query_stop), slice(run.key_start, run.key_stop)
        visible = None if run.num_queries == 1 else _visible(run, context, query.device)
        rollout_keys, rollout_values = (
            [x[queries] for x in steps] for steps in (keys.rollout_keys, keys.rollout_values)
        )
        weights = attention_weights(query[queries], keys.keys[seen], visible, rollout_keys, scale)
        if note is not None:
            note(weights, run.num_keys, run.key_start == tile.key_start)
        parts.append(weighted_values(weights.to(query.dtype), keys.values[seen], rollout_values))
    return torch.cat(parts)


def attention_weights(
    query: Tensor, keys: Tensor, visible: Tensor | None, rollout_keys: Sequence[Tensor], scale: float
) -> Tensor:
    """Return the softmax of the scores.

    Args:
        query: [R, Hq, D], rotated.
        keys: [S, Hkv, D] of step 0, rotated.
        visible: bool [R, S]; None makes every key visible.
        rollout_keys: k tensors [R, Hkv, D] of steps 1..k, each read by its row alone.
        scale: multiplies the scores.

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
