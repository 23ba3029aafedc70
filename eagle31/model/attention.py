"""Attention of a rollout step: the causal block of step-0 keys, and the row's own later keys.

`rollout_attention` builds the scores as they are defined: for decoding, whose queries are few, and for the
tests of the training step. `attend_by_document` calls it document by document, so that a packed row costs
what its documents cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def visible_keys(query_rows: Tensor, document_ids: Tensor) -> Tensor:
    """True where a query's row may read a step-0 key: same document, not later.

    Args:
        query_rows: int64 [R], indices into the T rows.
        document_ids: int64 [T].

    Returns:
        bool [R, T].
    """
    key_rows = torch.arange(document_ids.shape[0], device=document_ids.device)
    same = document_ids[query_rows].unsqueeze(1) == document_ids.unsqueeze(0)
    return same & (key_rows.unsqueeze(0) <= query_rows.unsqueeze(1))


def rollout_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    rollout_keys: Sequence[Tensor],
    rollout_values: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Softmax over the visible step-0 keys and the row's own keys of steps 1..k.

    Args:
        query: [R, Hq, D], rotated.
        keys: [T, Hkv, D] of step 0, rotated.
        values: [T, Hkv, Dv] of step 0.
        visible: bool [R, T].
        rollout_keys, rollout_values: k tensors [R, Hkv, D] and [R, Hkv, Dv], the row's own of steps 1..k.
        scale: of the scores.

    Returns:
        [R, Hq, Dv] in the query's dtype; scores and softmax are float32 (or wider).
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    # shape: [Hkv, group, R, D]
    grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = (grouped @ keys.permute(1, 2, 0).unsqueeze(1)).to(wide)  # shape: [Hkv, group, R, T]
    scores = scores.masked_fill(~visible, float("-inf"))
    # shape: [Hkv, group, R, k]
    own = [(grouped * key.permute(1, 0, 2).unsqueeze(1)).sum(-1, dtype=wide) for key in rollout_keys]
    if own:
        scores = torch.cat((scores, torch.stack(own, dim=-1)), dim=-1)
    weights = (scores * scale).softmax(dim=-1).to(query.dtype)
    num_keys = keys.shape[0]
    out = weights[..., :num_keys] @ values.permute(1, 0, 2).unsqueeze(1)
    for step, value in enumerate(rollout_values):
        out = out + weights[..., num_keys + step, None] * value.permute(1, 0, 2).unsqueeze(1)
    return out.permute(2, 0, 1, 3).reshape(num_rows, num_heads, values.shape[-1])


@dataclass(frozen=True)
class DocumentSpan:
    """The queries of one document, and the step-0 keys that they may read."""

    queries: slice
    keys: slice
    visible: Tensor  # bool [queries, keys]


def document_spans(query_rows: Tensor, document_ids: Tensor) -> list[DocumentSpan]:
    """Splits ascending `query_rows` int64 [R] by document; `document_ids` int64 [T] is in runs."""
    if not query_rows.numel():
        return []
    _, lengths = document_ids.unique_consecutive(return_counts=True)
    stops = lengths.cumsum(0)
    bounds = torch.searchsorted(query_rows, stops).tolist()
    spans = []
    first_query = first_key = 0
    for last_query, last_key in zip(bounds, stops.tolist(), strict=True):
        if last_query > first_query:
            queries = slice(first_query, last_query)
            keys = slice(first_key, int(query_rows[last_query - 1]) + 1)
            visible = visible_keys(query_rows[queries] - first_key, document_ids[keys])
            spans.append(DocumentSpan(queries, keys, visible))
        first_query, first_key = last_query, last_key
    return spans


def attend_by_document(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Sequence[DocumentSpan],
    rollout_keys: Sequence[Tensor],
    rollout_values: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """`rollout_attention` over each document's own keys; same shapes, `spans` in place of the mask."""
    if not spans:
        return query.new_zeros(*query.shape[:2], values.shape[-1])
    parts = [
        rollout_attention(
            query[span.queries],
            keys[span.keys],
            values[span.keys],
            span.visible,
            [key[span.queries] for key in rollout_keys],
            [value[span.queries] for value in rollout_values],
            scale,
        )
        for span in spans
    ]
    return torch.cat(parts)
