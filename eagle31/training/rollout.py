"""Recursive rollouts for training: tokens are teacher-forced, hidden states recurse."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle31.kernels.merged_attention import merged_attention
from eagle31.kernels.packed_attention import PackedBlock, flash_obstacle, packed_blocks, warn_once
from eagle31.kernels.packed_steps import PackedKeys, packed_attention
from eagle31.kernels.plain_attention import Attend, LayerKeys
from eagle31.kernels.query_run import QueryRun, context_window
from eagle31.kernels.split_linear import ProductSums, TokenProjection
from eagle31.kernels.step_sums import StepSums
from eagle31.kernels.tiled_attention import FlashKernel, PlainKernel, TiledBlock, tile_mask
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter, Prefill
from eagle31.model.rope import Rotary
from eagle31.training.batch import PackedBatch, captured_rows
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
) -> Iterator[tuple[Tensor, Tensor]]:
    """Roll all of `rows` out over all K speculation steps, supervised or not.

    Args:
        embed_tokens: [V, H], the frozen embedding.
        rows: int64 [R], ascending.
        token_ids: int64 [R, K], the tokens that the steps read in place of the text's.

    Yields:
        For each step the post-norm state that the head reads [R, H], and the state fed back [R, H].
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
        rows: int64 [S]. In a drafter of one layer each row is computed by itself; others need all key rows.
        host_rows: the same on the CPU.
        attend: attention of the rows, for layers before the last.
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
    attend = key_attention(schedule, drafter.config, embed_tokens)
    rows = schedule.key_rows, schedule.key_rows_host
    return prefill_in_parts(drafter, embed_tokens, batch, *rows, attend, part_rows)


def row_parts(drafter: Drafter, rows: slice, part_rows: int | None) -> list[slice]:
    """Split rows into parts that can be prefilled one after another; one where each row needs the others."""
    size = max(rows.stop - rows.start, 1)
    if part_rows is not None and len(drafter.layers) == 1:
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
) -> Iterator[tuple[Tensor, Tensor]]:
    """Roll the rows of a chunk out.

    At step k, row t has the embedding of x[t+1+k] and RoPE position t+k, and predicts x[t+2+k]. A step
    without rows runs too, so that every weight has a gradient.

    Args:
        state: [R, H], of `prefill` at the chunk's rows.
        keys: `Drafter.step_keys`, of all key rows.
        token_ids: int64, what the steps' `teacher_index` refers to; by default the text's at `teacher_rows`.

    Yields:
        For each step the post-norm state that the head reads [R_k, H], and the state fed back [R_k, H].

    Source: EAGLE-3 (arXiv 2503.01840) training-time test; arXiv 2605.09992 for the post-norm feedback.
    """
    steps = [(step.runs, step.first_index) for step in chunk.steps]
    blocks = _blocks(steps, chunk.longest_document, drafter.config, embed_tokens)
    if isinstance(blocks[0], PackedBlock):
        num_slots = len(blocks) - 1, len(state)
        keys = [replace(x, packed=PackedKeys(x.keys, x.values, *num_slots, x.sums)) for x in keys]
    if token_ids is None:
        token_ids = batch.input_ids[chunk.teacher_rows.clamp(max=len(batch.input_ids) - 1)]
    layer = drafter.decoder_layers[0]
    embeds = layer.input_layernorm(F.embedding(token_ids.flatten(), embed_tokens))
    # Those of the chunk's tokens with the projections of the first layer's attention, [J, out].
    products = [(projection(embeds, total := ProductSums()), total) for projection in layer.self_attn.inputs]
    rotations = _rotations(drafter.rotary, batch, chunk)
    sums = StepSums()
    for step, (scheduled, block, rotation) in enumerate(zip(chunk.steps, blocks, rotations, strict=True)):
        if step and scheduled.previous_index is not None:
            state = _SelectRows.apply(state, scheduled.previous_index)
            keys = [layer_keys.for_rows(scheduled.previous_index) for layer_keys in keys]
        tokens = [TokenProjection(product, scheduled.teacher_index, total) for product, total in products]
        attend = _attend(block, drafter.config.sliding_window)
        with sums.adding() if isinstance(block, PackedBlock) else nullcontext():
            normed, state, keys = drafter.rollout_step(step, state, tokens, rotation, attend, keys)
        yield normed, state


class _SelectRows(torch.autograd.Function):
    """A selection of rows whose backward pass adds nothing up, because no row is selected twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, index, grad), None


def _rotations(rotary: Rotary, batch: PackedBatch, chunk: ChunkSchedule) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield RoPE's cos and sin of each step, which are computed at once for the rows of step 0."""
    first = batch.position_ids[chunk.steps[0].rows]
    positions = first + torch.arange(len(chunk.steps), device=first.device).unsqueeze(1)
    tables = torch.stack(rotary(positions.flatten())).unflatten(1, positions.shape)
    for number, step in enumerate(chunk.steps):
        table = tables[:, number]
        cos, sin = table if step.first_index is None else table.index_select(1, step.first_index)
        yield cos, sin


def _no_attention(query: Tensor, keys: LayerKeys) -> Tensor:
    raise AssertionError("a drafter of one layer needs no attention before its drafts")


def _attend(block: PackedBlock | TiledBlock, window: int | None) -> Attend:
    def attend(query: Tensor, keys: LayerKeys) -> Tensor:
        if isinstance(block, TiledBlock):
            return merged_attention(block, query, keys.within(window))
        store = keys.packed or PackedKeys(keys.keys, keys.values)
        return packed_attention(block, store, query, *keys.rollout_keys, *keys.rollout_values)

    return attend


def key_attention(schedule: RolloutSchedule, config: DrafterConfig, like: Tensor) -> Attend:
    """Return the attention of all key rows, for layers before the last.

    Args:
        like: a tensor of the queries' dtype and device.
    """
    if config.num_hidden_layers == 1:
        return _no_attention
    (block,) = _blocks([(schedule.document_runs, None)], schedule.chunks[0].longest_document, config, like)
    return _attend(block, config.sliding_window)


def _blocks(
    steps: Sequence[tuple[Sequence[QueryRun], Tensor | None]],
    longest_document: int,
    config: DrafterConfig,
    like: Tensor,
) -> Sequence[PackedBlock | TiledBlock]:
    """Return the block of each step.

    Args:
        steps: the runs of each step and `StepSchedule.first_index`.
        longest_document, like: those of `ChunkSchedule` and `key_attention`.
    """
    window, scale = config.sliding_window, config.attention_scale
    # None where no query has as many keys.
    windows = [context_window(window, step) for step in range(len(steps))]
    windows = [None if size is None or size >= longest_document else size for size in windows]
    runs, indices = zip(*steps, strict=True)
    if _uses_packed_kernel(config, like):
        first_steps = [0 if window is None else max(0, step - window) for step in range(len(steps))]
        return packed_blocks(runs, indices, windows, first_steps, scale, like.device)
    masks = {size: tile_mask(longest_document, like, size) for size in set(windows) if size != 0}
    # The CPU's flash kernel has one width for keys and values, and is the slower one with padded values.
    plain = like.device.type == "cuda" or config.value_width < config.head_dim
    kernel = PlainKernel(scale) if plain else FlashKernel(scale)
    return [TiledBlock(of, masks.get(size), size, kernel) for of, size in zip(runs, windows, strict=True)]


def _uses_packed_kernel(config: DrafterConfig, like: Tensor) -> bool:
    if like.device.type != "cuda":
        return False
    obstacle = flash_obstacle(like.device, like.dtype, config.head_dim)
    if obstacle is not None:
        warn_once(like.device, obstacle)
    return obstacle is None
