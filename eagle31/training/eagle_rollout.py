"""The rollout of EAGLE: tokens are teacher-forced, hidden states recurse."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle31.kernels.packed_attention import PackedBlock
from eagle31.kernels.packed_steps import PackedKeys
from eagle31.kernels.plain_attention import LayerKeys
from eagle31.kernels.split_linear import ProductSums, TokenProjection
from eagle31.kernels.step_sums import StepSums
from eagle31.model.eagle import EagleDrafter
from eagle31.model.rope import Rotary
from eagle31.training.attention import attend_with, step_blocks
from eagle31.training.batch import PackedBatch
from eagle31.training.schedule import ChunkSchedule


def eagle_rollout(
    drafter: EagleDrafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    chunk: ChunkSchedule,
    state: Tensor,
    keys: list[LayerKeys],
    token_ids: Tensor,
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
    blocks = step_blocks(steps, chunk.longest_document, drafter.config, embed_tokens)
    if isinstance(blocks[0], PackedBlock):
        num_slots = len(blocks) - 1, len(state)
        keys = [replace(x, packed=PackedKeys(x.keys, x.values, *num_slots, x.sums)) for x in keys]
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
        attend = attend_with(block, drafter.config.sliding_window)
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
