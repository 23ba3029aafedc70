"""Rollouts of drafts along a text, and what they read of the captured states."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.plain_attention import Attend, LayerKeys
from eagle31.model.drafter import Drafter, Prefill
from eagle31.model.dspark import DSparkDrafter
from eagle31.model.eagle import EagleDrafter
from eagle31.training.attention import key_attention
from eagle31.training.batch import PackedBatch, captured_rows
from eagle31.training.dspark_rollout import dspark_rollout
from eagle31.training.eagle_rollout import eagle_rollout
from eagle31.training.schedule import ChunkSchedule, RolloutSchedule, schedule_rollout

# Rows that are prefilled or rolled out at a time where nothing else says how many.
CHUNK_ROWS = 4096


def rollout(
    drafter: Drafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    rows: Tensor,
    num_steps: int,
    token_ids: Tensor | None = None,
) -> Iterator[Tensor]:
    """Roll all of `rows` out over all K speculation steps, supervised or not.

    Args:
        embed_tokens: [V, H], the frozen embedding.
        rows: int64 [R], ascending.
        token_ids: int64 [R, K], the tokens that the steps read in place of the text's.

    Yields:
        For each step what the head reads, [R, W].
    """
    chosen = torch.zeros(len(batch.input_ids), num_steps, dtype=torch.bool)
    chosen[rows.cpu()] = True
    schedule = schedule_rollout(chosen, batch.document_ids.cpu(), rows.device, drafter.config.key_reach)
    (chunk,) = schedule.chunks
    if token_ids is not None:
        index = torch.arange(token_ids.numel(), device=rows.device).view_as(token_ids)
        steps = (replace(step, teacher_index=index[:, k]) for k, step in enumerate(chunk.steps))
        chunk = replace(chunk, steps=tuple(steps))
    state, keys = prefill_schedule(drafter, embed_tokens, batch, schedule, CHUNK_ROWS)
    state = state[chunk.query_index]
    yield from chunk_rollout(drafter, embed_tokens, batch, chunk, state, keys, token_ids)


def prefill(
    drafter: Drafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    rows: Tensor,
    host_rows: Tensor,
    attend: Attend,
) -> Prefill:
    """Compute what drafts read of the captured states.

    Args:
        rows: int64 [S]; all key rows unless the drafter `prefills_rows_alone`.
        host_rows: the same on the CPU.
        attend: of `Drafter.prefill`.
    """
    # After the last token, where no step is supervised, the token is arbitrary.
    next_ids = batch.input_ids[(rows + 1).clamp(max=len(batch.input_ids) - 1)]
    fused = drafter.fuse(captured_rows(batch.aux_hidden_states, rows, host_rows, embed_tokens.dtype))
    return drafter.prefill(fused, F.embedding(next_ids, embed_tokens), batch.position_ids[rows], attend)


def prefill_in_parts(
    drafter: Drafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    rows: Tensor,
    host_rows: Tensor,
    attend: Attend,
    part_rows: int | None,
) -> tuple[Tensor, list[LayerKeys]]:
    """Return the state [S, H] and each layer's keys at all rows; the arguments are those of `prefill`.

    Args:
        part_rows: rows that are computed together, where each is computed by itself; None for all.
    """

    def of_part(part: slice) -> list[Tensor]:
        found = prefill(drafter, embed_tokens, batch, rows[part], host_rows[part], attend)
        keys = drafter.step_keys(found)
        return [found.state, *(x for layer in keys for x in (layer.keys, layer.values))]

    state, *keys = filled(len(rows), row_parts(drafter, slice(0, len(rows)), part_rows), of_part)
    return state, [LayerKeys(*layer) for layer in zip(keys[::2], keys[1::2], strict=True)]


def prefill_schedule(
    drafter: Drafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    schedule: RolloutSchedule,
    part_rows: int | None,
) -> tuple[Tensor, list[LayerKeys]]:
    """Return `prefill_in_parts` at all key rows of a schedule."""
    attend = key_attention(schedule, drafter, embed_tokens)
    rows = schedule.key_rows, schedule.key_rows_host
    return prefill_in_parts(drafter, embed_tokens, batch, *rows, attend, part_rows)


def row_parts(drafter: Drafter, rows: slice, part_rows: int | None) -> list[slice]:
    """Split rows into parts that can be prefilled one after another; one where each row needs the others."""
    size = max(rows.stop - rows.start, 1)
    if part_rows is not None and drafter.prefills_rows_alone:
        size = part_rows
    starts = range(rows.start, max(rows.stop, rows.start + 1), size)
    return [slice(start, min(start + size, rows.stop)) for start in starts]


def filled(
    num_rows: int, parts: Sequence[slice], function: Callable[[slice], Sequence[Tensor]]
) -> list[Tensor]:
    """Return tensors of `num_rows` rows, which have at these parts what the function returns for them."""
    if list(parts) == [slice(0, num_rows)]:
        return list(function(parts[0]))
    whole: list[Tensor] = []
    for part in parts:
        found = function(part)
        whole = whole or [x.new_empty(num_rows, *x.shape[1:]) for x in found]
        for x, rows in zip(whole, found, strict=True):
            x[part] = rows
    return whole


def chunk_rollout(
    drafter: Drafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    chunk: ChunkSchedule,
    state: Tensor,
    keys: list[LayerKeys],
    token_ids: Tensor | None = None,
) -> Iterator[Tensor]:
    """Roll the rows of a chunk out: at step k, row t predicts x[t+2+k] from the tokens up to x[t+1+k].

    Args:
        state: [R, W], of `prefill` at the chunk's rows.
        keys: `Drafter.step_keys`, of all key rows.
        token_ids: int64, what the steps' `teacher_index` refers to; by default the text's at `teacher_rows`.

    Yields:
        For each step what the head reads, [R_k, W].
    """
    if token_ids is None:
        token_ids = batch.input_ids[chunk.teacher_rows.clamp(max=len(batch.input_ids) - 1)]
    if isinstance(drafter, DSparkDrafter):
        yield from dspark_rollout(drafter, embed_tokens, batch, chunk, keys, token_ids)
    elif isinstance(drafter, EagleDrafter):
        for normed, _ in eagle_rollout(drafter, embed_tokens, batch, chunk, state, keys, token_ids):
            yield normed
