"""A projection of two concatenated inputs, where many rows share the product with the first input.

At step k of a rollout, row t reads the embedding of x[t+1+k], so each token is read by up to as many
(row, step) pairs as there are steps. The token's product with its half of the weight is the same in all of
them. It is computed once, and every step adds the product with its own recursing state.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class TokenProjection(NamedTuple):
    """Products of token embeddings with the first half of a weight, and the one that each row adds."""

    products: Tensor  # [U, out]
    indices: Tensor  # int64 [N], into the products; no two rows of a step read the same token


class _AddedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, index)
        ctx.num_products = len(products)
        second = weight[:, weight.shape[1] - x.shape[1] :]
        return products.index_select(0, index).addmm_(x, second.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, index = ctx.saved_tensors
        width = weight.shape[1] - x.shape[1]
        grad_weight = torch.zeros_like(weight)
        torch.mm(grad.t(), x, out=grad_weight[:, width:])
        # A sum would need atomic additions on a GPU, whose order changes from run to run.
        grad_products = grad.new_zeros(ctx.num_products, grad.shape[1]).index_copy_(0, index, grad)
        return grad @ weight[:, width:], grad_weight, grad_products, None


class SplitLinear(nn.Linear):
    """A projection of concat(first, second), each `in_features // 2` wide. A bias belongs to the second.

    Every computation is a call of this one module, because sharded weights are gathered module by module.
    """

    def forward(self, x: Tensor, tokens: TokenProjection | None = None) -> Tensor:
        """Return the projection [N, out].

        Args:
            x: both inputs [N, in], or the first alone [N, in // 2]; with `tokens` the second alone.
            tokens: the products with the first input.
        """
        if tokens is not None:
            product: Tensor = _AddedProduct.apply(x, self.weight, tokens.products, tokens.indices)
            return product if self.bias is None else product + self.bias
        both = x.shape[1] == self.in_features
        return F.linear(x, self.weight[:, : x.shape[1]], self.bias if both else None)


def project(projection: nn.Module, x: Tensor, tokens: TokenProjection | None) -> Tensor:
    """Call `projection`; with `tokens` it is a `SplitLinear`, and `x` its second input alone."""
    product: Tensor = projection(x) if tokens is None else projection(x, tokens)
    return product
