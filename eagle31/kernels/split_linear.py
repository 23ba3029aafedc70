"""A projection of two inputs side by side, where many rows share the product with the first.

In a rollout row t reads at step k the embedding of x[t+1+k], so a token meets as many (row, step) pairs as
there are steps. Its share of the product is the same in all of them: it is computed once, and every step adds
the product with its own recursing state.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class TokenProjection(NamedTuple):
    """Products with the first input, and which of them each row adds."""

    products: Tensor  # [U, out]
    at: Tensor  # int64 [N], into the products


class _AddedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, at)
        ctx.num_products = len(products)
        second = weight[:, weight.shape[1] - x.shape[1] :]
        return products.index_select(0, at).addmm_(x, second.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, at = ctx.saved_tensors
        width = weight.shape[1] - x.shape[1]
        grad_weight = torch.zeros_like(weight)
        torch.mm(grad.t(), x, out=grad_weight[:, width:])
        grad_products = grad.new_zeros(ctx.num_products, grad.shape[1]).index_add_(0, at, grad)
        return grad @ weight[:, width:], grad_weight, grad_products, None


class SplitLinear(nn.Linear):
    """A projection of concat(first, second), `in_features // 2` wide each.

    One module call whatever is computed, as sharded weights are gathered by module.
    """

    def forward(self, x: Tensor, share: TokenProjection | None = None) -> Tensor:
        """[N, out] of both inputs [N, in], of the first alone [N, in // 2], or of the second and a share."""
        if share is not None:
            return _AddedProduct.apply(x, self.weight, share.products, share.at)
        return F.linear(x, self.weight[:, : x.shape[1]])


def projected(projection: nn.Module, x: Tensor, share: TokenProjection | None) -> Tensor:
    """With a share, `projection` is a `SplitLinear` and `x` its second input alone."""
    product: Tensor = projection(x) if share is None else projection(x, share)
    return product
