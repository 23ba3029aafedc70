"""A selection of rows whose backward pass adds nothing up, because no row is selected twice."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SelectRows(torch.autograd.Function):
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


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index]. x: [N, ...], index: int64 [R], without repetitions."""
    selected: Tensor = _SelectRows.apply(x, index)
    return selected
