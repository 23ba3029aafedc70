"""The backward pass of RMSNorm as a Triton kernel that adds to the weight's gradient of earlier calls.

Liger-Kernel's sums the weight's gradient of each call in separate operations, fills the input's with zeros
first, and with a residual is compiled again for each number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_backward_kernel(
    grad, of_sum, x, weight, inverse, out, partial, num_rows, x_stride, width, BLOCK: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    at_partial = partial + tl.program_id(0) * width + columns
    of_weight = tl.load(at_partial, mask=inside, other=0.0)
    for number in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        slope = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(inverse + row)
        normed = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32) * factor
        of_weight += slope * normed
        if out is not None:
            slope *= scale
            found = (slope - normed * (tl.sum(slope * normed, axis=0) / width)) * factor
            if of_sum is not None:
                found += tl.load(of_sum + row * width + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + row * width + columns, found.to(out.dtype.element_ty), mask=inside)
    tl.store(at_partial, of_weight, mask=inside)


def norm_backward(
    grad: Tensor,
    of_sum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    partial: Tensor | None,
    for_input: bool,
) -> tuple[Tensor | None, Tensor]:
    """Return the gradient of the input, and what is to be summed for the weight's.

    Args:
        grad: [N, H] of the norm.
        of_sum: [N, H] of the input itself, added to the result; None for zero.
        x: [N, H] the input, of any row stride.
        inverse: float32 [N], of the root mean squares.
        partial: the second result of the call before, which this one adds to; None for the first.
        for_input: False computes no gradient of the input.

    Returns:
        [N, H] or None, and float32 [programs, H].
    """
    num_rows, width = x.shape
    if partial is None:
        partial = torch.zeros(_programs(x.device), width, dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if for_input else None
    block = triton.next_power_of_2(width)
    _norm_backward_kernel[(len(partial),)](
        grad, of_sum, x, weight, inverse, out, partial, num_rows, x.stride(0), width,
        BLOCK=block, num_warps=min(16, max(2, block // 256)),
    )  # fmt: skip
    return out, partial


def _programs(device: torch.device) -> int:
    """Return two programs for each multiprocessor; a few where Triton is interpreted."""
    if device.type != "cuda":
        return 3
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
