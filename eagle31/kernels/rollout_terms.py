"""The terms of the rollout keys in merged attention, as Triton kernels.

A program computes one row's queries that share a key head. It reads the row's rollout keys and values where
they are and adds up in float32, so nothing is gathered and no sum is written to memory.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle31.kernels.packed_attention import PackedBlock


@triton.jit
def _program(rows, places):
    """Return a program's row and key head, the row's slot, and its place among the queries of the block."""
    row = tl.program_id(0).to(tl.int64)
    slot, place = row, row
    if rows is not None:
        slot = tl.load(rows + row)
    if places is not None:
        place = tl.load(places + row)
    return row, tl.program_id(1), slot, place


@triton.jit
def _merge_kernel(
    output, lse, query, own_key, own_value, keys, values, merged,
    rows, places, first, count, scale, query_stride, lse_stride, output_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    STEP_ROWS, BLOCK_GROUP: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Merge the rollout terms into the output of the step-0 keys, and copy the row's own key and value."""
    row, head, slot, place = _program(rows, places)
    lanes, d, dv = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_VALUE)
    q_heads = head * GROUP + lanes
    in_group, in_width, in_value = lanes < GROUP, d < WIDTH, dv < VALUE_WIDTH
    of_query, of_output = in_group[:, None] & in_width[None], in_group[:, None] & in_value[None]
    at_query = (place * HEADS * GROUP + q_heads[:, None]) * query_stride + d[None]
    q = tl.load(query + at_query, mask=of_query, other=0.0).to(tl.float32)
    at_lse = lse + q_heads.to(tl.int64) * lse_stride + place
    if output is None:
        largest = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_GROUP,), tl.float32)
        acc = tl.zeros((BLOCK_GROUP, BLOCK_VALUE), tl.float32)
    else:
        largest = tl.load(at_lse, mask=in_group, other=0.0)
        total = tl.full((BLOCK_GROUP,), 1.0, tl.float32)
        at_output = (place * HEADS * GROUP + q_heads[:, None]) * output_stride + dv[None]
        acc = tl.load(output + at_output, mask=of_output, other=0.0).to(tl.float32)
    at_own_key, at_own_value = (row * HEADS + head) * WIDTH + d, (row * HEADS + head) * VALUE_WIDTH + dv
    for step in range(first, count):
        at = (step * STEP_ROWS + slot) * HEADS + head
        if step == count - 1:
            key = tl.load(own_key + at_own_key, mask=in_width, other=0.0)
            value = tl.load(own_value + at_own_value, mask=in_value, other=0.0)
            tl.store(keys + at * WIDTH + d, key, mask=in_width)
            tl.store(values + at * VALUE_WIDTH + dv, value, mask=in_value)
        else:
            key = tl.load(keys + at * WIDTH + d, mask=in_width, other=0.0)
            value = tl.load(values + at * VALUE_WIDTH + dv, mask=in_value, other=0.0)
        score = tl.sum(q * key.to(tl.float32)[None], axis=1) * scale
        larger = tl.maximum(largest, score)
        old, new = tl.exp(largest - larger), tl.exp(score - larger)
        acc = acc * old[:, None] + new[:, None] * value.to(tl.float32)[None]
        total = total * old + new
        largest = larger
    at_merged = (row * HEADS * GROUP + q_heads[:, None]) * VALUE_WIDTH + dv[None]
    acc = acc / total[:, None]
    tl.store(merged + at_merged, acc.to(merged.dtype.element_ty), mask=of_output)
    tl.store(at_lse, largest + tl.log(total), mask=in_group)


@triton.jit
def _backward_kernel(
    grad, query, output, lse, keys, values, grad_keys, grad_values, padded_query,
    grad_query, own_key, own_value, rows, places, first, count, scale,
    query_stride, lse_stride, padded_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    STEP_ROWS, BLOCK_GROUP: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Add the rollout terms to the query's gradient and to the sums of keys and values."""
    row, head, slot, place = _program(rows, places)
    lanes, d, dv = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_VALUE)
    q_heads = head * GROUP + lanes
    in_group, in_width, in_value = lanes < GROUP, d < WIDTH, dv < VALUE_WIDTH
    of_query, of_output = in_group[:, None] & in_width[None], in_group[:, None] & in_value[None]
    at_query = (place * HEADS * GROUP + q_heads[:, None]) * query_stride + d[None]
    at_output = (row * HEADS * GROUP + q_heads[:, None]) * VALUE_WIDTH + dv[None]
    q = tl.load(query + at_query, mask=of_query, other=0.0).to(tl.float32)
    g = tl.load(grad + at_output, mask=of_output, other=0.0).to(tl.float32)
    out = tl.load(output + at_output, mask=of_output, other=0.0).to(tl.float32)
    delta = tl.sum(g * out, axis=1)
    at_lse = lse + q_heads.to(tl.int64) * lse_stride + place
    log_total = tl.load(at_lse, mask=in_group, other=0.0)
    if padded_query is None:
        acc = tl.zeros((BLOCK_GROUP, BLOCK_WIDTH), tl.float32)
    else:
        at_padded = (place * HEADS * GROUP + q_heads[:, None]) * padded_stride + d[None]
        acc = tl.load(padded_query + at_padded, mask=of_query, other=0.0).to(tl.float32)
    at_own_key, at_own_value = (row * HEADS + head) * WIDTH + d, (row * HEADS + head) * VALUE_WIDTH + dv
    for step in range(first, count):
        at = (step * STEP_ROWS + slot) * HEADS + head
        at_key, at_value = at * WIDTH + d, at * VALUE_WIDTH + dv
        key = tl.load(keys + at_key, mask=in_width, other=0.0).to(tl.float32)
        value = tl.load(values + at_value, mask=in_value, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * key[None], axis=1) * scale - log_total)
        weight = tl.where(in_group, weight, 0.0)
        slope = (tl.sum(g * value[None], axis=1) - delta) * weight * scale
        acc += slope[:, None] * key[None]
        of_key = tl.sum(slope[:, None] * q, axis=0)
        of_value = tl.sum(weight[:, None] * g, axis=0)
        of_key += tl.load(grad_keys + at_key, mask=in_width, other=0.0).to(tl.float32)
        of_value += tl.load(grad_values + at_value, mask=in_value, other=0.0).to(tl.float32)
        if step == count - 1:
            tl.store(own_key + at_own_key, of_key.to(own_key.dtype.element_ty), mask=in_width)
            tl.store(own_value + at_own_value, of_value.to(own_value.dtype.element_ty), mask=in_value)
        else:
            tl.store(grad_keys + at_key, of_key.to(grad_keys.dtype.element_ty), mask=in_width)
            tl.store(grad_values + at_value, of_value.to(grad_values.dtype.element_ty), mask=in_value)
    at_grad = (row * HEADS * GROUP + q_heads[:, None]) * WIDTH + d[None]
    tl.store(grad_query + at_grad, acc.to(grad_query.dtype.element_ty), mask=of_query)


@triton.jit
def _spread_kernel(
    x, other, spread, other_spread, sources, heads, x_stride, spread_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a head of the row that a place comes from, or zeros, which are after the head's end too."""
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = place
    if sources is not None:
        row = tl.load(sources + place)
    columns = tl.arange(0, BLOCK)
    source, target = (
        (row * heads + head) * x_stride + columns,
        (place * heads + head) * spread_stride + columns,
    )
    inside, kept = (columns < WIDTH) & (row >= 0), columns < spread_stride
    tl.store(spread + target, tl.load(x + source, mask=inside, other=0.0), mask=kept)
    if other is not None:
        tl.store(other_spread + target, tl.load(other + source, mask=inside, other=0.0), mask=kept)


@triton.jit
def _add_rows_kernel(total, index, x, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = total + tl.load(index + row) * width + columns
    added = tl.load(x + row * width + columns, mask=inside).to(tl.float32)
    added += tl.load(at, mask=inside).to(tl.float32)
    tl.store(at, added.to(total.dtype.element_ty), mask=inside)


def merge_rollout(
    block: PackedBlock,
    attended: tuple[Tensor, Tensor] | None,
    query: Tensor,
    own: Sequence[Tensor],
    slots: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Merge the terms of a step's rollout keys into the attention to the step-0 keys.

    Args:
        block: has the places of the R rows among the P and among those of step 0, and the slots that they
            read.
        attended: output [P, Hq, W], of which the first Dv of each head are read, and log-sum-exp float32
            [Hq, P], which is overwritten; None where no step-0 key is visible.
        query: [P, Hq, W], of which the first D of each head are read.
        own: the key and value of this step, [R, Hkv, D] and [R, Hkv, Dv].
        slots: [K - 1, R_0, Hkv, D] and [K - 1, R_0, Hkv, Dv], the keys and values of steps 1..K-1 at the rows
            of step 0; the step's own are copied to the last slot that it reads.

    Returns:
        The merged output [R, Hq, Dv] and log-sum-exp [Hq, P].
    """
    key, value = own
    num_rows, heads, width = key.shape
    merged = query.new_empty(num_rows, query.shape[1], value.shape[-1])
    output, lse = attended or (None, query.new_empty(query.shape[1], len(query), dtype=torch.float32))
    _merge_kernel[(num_rows, heads)](
        output, lse, query, key, value, *slots, merged,
        block.first_index, block.places, *block.read_steps, block.scale, query.shape[-1], lse.stride(0),
        0 if output is None else output.shape[-1],
        HEADS=heads, GROUP=query.shape[1] // heads, STEP_ROWS=slots[0].shape[1],
        **_widths(query.shape[1] // heads, width, value.shape[-1]),
    )  # fmt: skip
    return merged, lse


def rollout_backward(
    block: PackedBlock,
    grad: Tensor,
    query: Tensor,
    output: Tensor,
    lse: Tensor,
    slots: Sequence[Tensor],
    sums: Sequence[Tensor],
    grad_query: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the query and of the step's own key and value.

    Args:
        grad, output: [R, Hq, Dv].
        block, query, slots: those of `merge_rollout`; lse is its result.
        sums: in the shapes of the slots: the gradients of their keys and values by later steps. Those by this
            step are added.
        grad_query: the gradient by the step-0 keys [P, Hq, W], of which the first D of each head are read;
            None where no step-0 key is visible.

    Returns:
        [R, Hq, D], [R, Hkv, D] and [R, Hkv, Dv].
    """
    heads, width = slots[0].shape[2:]
    num_rows, num_queries, value_width = grad.shape
    found = query.new_empty(num_rows, num_queries, width)
    own = query.new_empty(num_rows, heads, width), query.new_empty(num_rows, heads, value_width)
    _backward_kernel[(num_rows, heads)](
        grad, query, output, lse, *slots, *sums, grad_query,
        found, *own, block.first_index, block.places, *block.read_steps, block.scale,
        query.shape[-1], lse.stride(0),
        0 if grad_query is None else grad_query.shape[-1],
        HEADS=heads, GROUP=num_queries // heads, STEP_ROWS=slots[0].shape[1],
        **_widths(num_queries // heads, width, value_width),
    )  # fmt: skip
    return found, *own


def spread_rows(tensors: Sequence[Tensor], sources: Tensor | None, width: int) -> Sequence[Tensor]:
    """Place rows among others that are zeros, and append zeros to each head.

    Args:
        tensors: one or two, [R, H, D].
        sources: int64 [P], the row that comes to each place, or -1; None where all do in their order.

    Returns:
        As many, [P, H, width].
    """
    x, *other = tensors
    if sources is None and width == x.shape[-1]:
        return tensors
    num_places = len(x) if sources is None else len(sources)
    spread = [one.new_empty(num_places, one.shape[1], width) for one in tensors]
    _spread_kernel[(num_places, x.shape[1])](
        x, other[0] if other else None, spread[0], spread[-1], sources, x.shape[1], x.shape[2], width,
        WIDTH=x.shape[2], BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return spread


def add_rows(total: Tensor, index: Tensor, x: Tensor) -> None:
    """Add x [R, W] to the rows `index`, int64 [R] without repetitions, of `total` [N, W]."""
    block = min(triton.next_power_of_2(x.shape[1]), 2048)
    _add_rows_kernel[(len(x), triton.cdiv(x.shape[1], block))](
        total, index, x.contiguous(), x.shape[1], BLOCK=block
    )


def _widths(group: int, width: int, value_width: int) -> dict[str, int]:
    """Return the sizes of a program: its warps hold about 16 elements of queries in each thread."""
    blocks = [triton.next_power_of_2(x) for x in (group, width, value_width)]
    num_warps = min(8, max(1, blocks[0] * blocks[1] // 512))
    names = ("BLOCK_GROUP", "BLOCK_WIDTH", "BLOCK_VALUE")
    return {
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
        "num_warps": num_warps,
        **dict(zip(names, blocks, strict=True)),
    }
