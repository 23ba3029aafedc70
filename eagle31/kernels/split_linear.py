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

from eagle31.kernels import dispatch


class ProductSums:
    """Gradients that every step's backward pass adds to: of the products, and of the weight's second half."""

    def __init__(self) -> None:
        self.products: Tensor | None = None  # [U, out]
        self.weight: Tensor | None = None  # [out, in], of which the second half is filled

    def add(self, grad: Tensor, index: Tensor, x: Tensor, num_products: int) -> None:
        """Add those of a step, whose output has the gradient `grad` [N, out]."""
        if self.products is None or self.weight is None:
            self.products = grad.new_zeros(num_products, grad.shape[1])
            self.weight = x.new_empty(grad.shape[1], 2 * x.shape[1])
            torch.mm(grad.t(), x, out=self.weight[:, x.shape[1] :])
        else:
            self.weight[:, x.shape[1] :].addmm_(grad.t(), x)
        if dispatch.has_triton(grad):
            from eagle31.kernels.rollout_terms import add_rows

            add_rows(self.products, index, grad)
        else:
            self.products.index_add_(0, index, grad)

    def taken(self) -> tuple[Tensor, Tensor]:
        """Return both, of which no other reference is left."""
        products, weight = self.products, self.weight
        assert products is not None
        assert weight is not None
        self.products = self.weight = None
        return products, weight


class TokenProjection(NamedTuple):
    """Products of token embeddings with the first half of a weight, and the one that each row adds."""

    products: Tensor  # [U, out]
    indices: Tensor  # int64 [N], into the products; no two rows of a step read the same token
    sums: ProductSums  # those that the products were made with


class _Products(torch.autograd.Function):
    """Steps add to the sums, which are the gradients, and return none for the products and the weight."""

    @staticmethod
    def forward(ctx: Any, sums: ProductSums, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        return x @ weight[:, : x.shape[1]].t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        products, grad_weight = ctx.sums.taken()
        torch.mm(products.t(), x, out=grad_weight[:, : x.shape[1]])
        return None, products @ weight[:, : x.shape[1]], grad_weight


class _AddedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tokens: TokenProjection, products: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, tokens.indices)
        ctx.sums, ctx.num_products = tokens.sums, len(products)
        return products.index_select(0, tokens.indices).addmm_(x, weight[:, x.shape[1] :].t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, index = ctx.saved_tensors
        ctx.sums.add(grad, index, x, ctx.num_products)
        return grad @ weight[:, x.shape[1] :], None, None, None


class SplitLinear(nn.Linear):
    """A projection of concat(first, second), each `in_features // 2` wide. A bias belongs to the second.

    Layers after the first have a single input, and call it without `tokens`.

    Every computation is a call of this one module, because sharded weights are gathered module by module.
    """

    def forward(self, x: Tensor, tokens: TokenProjection | ProductSums | None = None) -> Tensor:
        """Return the projection [N, out].

        Args:
            x: both inputs [N, in]; with `tokens` one of them.
            tokens: the products with the first input; or, to make them from it, their sums.
        """
        if tokens is None:
            return F.linear(x, self.weight, self.bias)
        if isinstance(tokens, ProductSums):
            return _Products.apply(tokens, x, self.weight)
        product: Tensor = _AddedProduct.apply(x, self.weight, tokens, tokens.products)
        return product if self.bias is None else product + self.bias
