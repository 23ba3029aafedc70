"""Rotary position embedding as a Triton kernel.

Liger-Kernel's has one table of positions for the rows of a batch, rotates queries and keys of [B, H, S, D] in
place, and knows no pairs (2i, 2i + 1); here each row has its own position.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn_kernel(
    x, out, cos, sin, row_stride, head_stride, heads,
    PLAIN: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_PLAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_HALF)
    in_half = columns < HALF
    in_head = head < heads
    mask = in_head[:, None] & in_half[None]
    width: tl.constexpr = PLAIN + 2 * HALF
    source = x + row * row_stride + head[:, None] * head_stride
    target = out + (row * heads + head[:, None]) * width
    if PLAIN > 0:
        plain = tl.arange(0, BLOCK_PLAIN)
        kept = in_head[:, None] & (plain < PLAIN)[None]
        tl.store(target + plain[None], tl.load(source + plain[None], mask=kept), mask=kept)
    cosine = tl.load(cos + row * 2 * HALF + columns, mask=in_half, other=0.0).to(tl.float32)[None]
    sine = tl.load(sin + row * 2 * HALF + columns, mask=in_half, other=0.0).to(tl.float32)[None]
    halves = columns, columns + HALF
    in_pairs = 2 * columns, 2 * columns + 1
    from_first, from_second = in_pairs if PAIRS and not BACKWARD else halves
    to_first, to_second = in_pairs if PAIRS and BACKWARD else halves
    if BACKWARD:
        sine = -sine
    first = tl.load(source + PLAIN + from_first[None], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + PLAIN + from_second[None], mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(target + PLAIN + to_first[None], (first * cosine - second * sine).to(dtype), mask=mask)
    tl.store(target + PLAIN + to_second[None], (second * cosine + first * sine).to(dtype), mask=mask)


def turn(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool, backward: bool) -> Tensor:
    """Rotate the last W entries of each head and copy those before.

    Args:
        x: [N, heads, D]; rows and heads may have any strides.
        cos, sin: float32 [N, W], both halves equal.
        pairs: the input has the pairs (2i, 2i + 1), and the result (i, i + W / 2).
        backward: undo it, for gradients.
    """
    num_rows, heads, width = x.shape
    half = cos.shape[-1] // 2
    plain = width - 2 * half
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(half)
    block_heads = min(triton.next_power_of_2(heads), max(1, 2048 // block))
    _turn_kernel[(num_rows, triton.cdiv(heads, block_heads))](
        x, out, cos, sin, x.stride(0), x.stride(1), heads,
        PLAIN=plain, HALF=half, PAIRS=pairs, BACKWARD=backward,
        BLOCK_HEADS=block_heads, BLOCK_HALF=block, BLOCK_PLAIN=triton.next_power_of_2(max(plain, 1)),
    )  # fmt: skip
    return out
