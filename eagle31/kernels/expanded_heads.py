"""The keys and values of multi-head latent attention from the products with its latent, as Triton kernels.

A row's product has for each head a part of its key and its value. The rest of the key, rotated, is the same
in all heads. One pass writes both, and one pass of the backward direction joins their gradients.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _expand_kernel(
    products, shared, keys, values, heads,
    PLAIN: tl.constexpr, SHARED: tl.constexpr, VALUE: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PLAIN: tl.constexpr, BLOCK_SHARED: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Write keys and values; backward, write the gradients of products and of the shared part from theirs."""
    row = tl.program_id(0).to(tl.int64)
    plain, rest, value = tl.arange(0, BLOCK_PLAIN), tl.arange(0, BLOCK_SHARED), tl.arange(0, BLOCK_VALUE)
    of_shared = shared + row * SHARED + rest
    total = tl.zeros((BLOCK_SHARED,), tl.float32)
    if not BACKWARD:
        part = tl.load(of_shared, mask=rest < SHARED, other=0.0)
    for first in range(0, heads, BLOCK_HEADS):
        head = first + tl.arange(0, BLOCK_HEADS)
        inside = (head < heads)[:, None]
        in_plain, in_rest, in_value = (
            inside & (plain < PLAIN)[None], inside & (rest < SHARED)[None], inside & (value < VALUE)[None]
        )  # fmt: skip
        at = row * heads + head[:, None]
        product, key = products + at * (PLAIN + VALUE), keys + at * (PLAIN + SHARED)
        if BACKWARD:
            tl.store(product + plain[None], tl.load(key + plain[None], mask=in_plain), mask=in_plain)
            of_value = tl.load(values + at * VALUE + value[None], mask=in_value)
            tl.store(product + PLAIN + value[None], of_value, mask=in_value)
            grads = tl.load(key + PLAIN + rest[None], mask=in_rest, other=0.0)
            total += tl.sum(grads.to(tl.float32), axis=0)
        else:
            tl.store(key + plain[None], tl.load(product + plain[None], mask=in_plain), mask=in_plain)
            repeated = tl.broadcast_to(part[None], (BLOCK_HEADS, BLOCK_SHARED))
            tl.store(key + PLAIN + rest[None], repeated, mask=in_rest)
            of_value = tl.load(product + PLAIN + value[None], mask=in_value)
            tl.store(values + at * VALUE + value[None], of_value, mask=in_value)
    if BACKWARD:
        tl.store(of_shared, total.to(shared.dtype.element_ty), mask=rest < SHARED)


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Tensor, shared: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
        num_rows, heads, width = products.shape
        keys = products.new_empty(num_rows, heads, width - value_width + shared.shape[-1])
        values = products.new_empty(num_rows, heads, value_width)
        _launch(products, shared.contiguous(), keys, values, backward=False)
        ctx.shared_width = shared.shape[-1]
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_keys: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor, None]:
        num_rows, heads, width = grad_keys.shape
        shared_width = ctx.shared_width
        products = grad_keys.new_empty(num_rows, heads, width - shared_width + grad_values.shape[-1])
        shared = grad_keys.new_empty(num_rows, 1, shared_width)
        _launch(products, shared, grad_keys.contiguous(), grad_values.contiguous(), backward=True)
        return products, shared, None


def _launch(products: Tensor, shared: Tensor, keys: Tensor, values: Tensor, backward: bool) -> None:
    num_rows, heads, key_width = keys.shape
    widths = key_width - shared.shape[-1], shared.shape[-1], values.shape[-1]
    blocks = [triton.next_power_of_2(width) for width in widths]
    block_heads = min(triton.next_power_of_2(heads), max(1, 4096 // sum(blocks)))
    _expand_kernel[(num_rows,)](
        products, shared, keys, values, heads, *widths, BACKWARD=backward,
        BLOCK_HEADS=block_heads, BLOCK_PLAIN=blocks[0], BLOCK_SHARED=blocks[1], BLOCK_VALUE=blocks[2],
    )  # fmt: skip


def expanded_heads(products: Tensor, shared: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    """Return each head's keys [N, H, P + S] and values [N, H, V].

    Args:
        products: [N, H, P + V], a head's part of its key and its value.
        shared: [N, 1, S], the rest of the key.
    """
    return _Expanded.apply(products, shared, value_width)
