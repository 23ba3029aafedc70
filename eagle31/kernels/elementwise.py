"""RMSNorm, SwiGLU's down projection and RoPE with short backward passes.

Autograd's backward passes of these memory-bound operations read their operands many times on the CPU. The
ones here read them once or twice and save only the inputs. Without gradients the operations are called
directly.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inverse = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        wide_grad = grad.to(inverse.dtype)
        normed = x.to(inverse.dtype) * inverse
        along = wide_grad * normed
        grad_weight = along.flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        wide_weight = weight.to(inverse.dtype)
        inward = (along @ wide_weight).div_(-x.shape[-1]).unsqueeze(-1)
        torch.mul(wide_grad, wide_weight, out=along)
        along.addcmul_(normed, inward).mul_(inverse)
        return along.to(x.dtype), grad_weight, None


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normed x, and the inverse of its RMS in float32 or wider."""
    wide = x.to(widened(x.dtype))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = (norm.square_().div_(x.shape[-1]).add_(eps)).rsqrt_()
    return (wide * inverse).mul_(weight).to(x.dtype), inverse


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last dimension of [..., H], computed in float32 or wider.

    On CUDA it is PyTorch's fused kernel.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            return super().forward(x)
        assert self.eps is not None
        if not torch.is_grad_enabled():
            return _normed(x, self.weight, self.eps)[0]
        return _RMSNorm.apply(x, self.weight, self.eps)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return _gated(gate, up) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weight = ctx.saved_tensors
        active = F.silu(gate)
        gated = active * up
        grad_weight = grad.t() @ gated
        grad_gated = torch.mm(grad, weight, out=gated)
        grad_up = active.mul_(grad_gated)
        return torch.ops.aten.silu_backward(grad_gated.mul_(up), gate), grad_up, grad_weight


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


class GatedLinear(nn.Linear):
    """The down projection of a SwiGLU.

    It saves neither silu(gate) nor the product that it projects; the backward pass computes them again.
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        """Return (silu(gate) * up) @ weight.T + bias. gate, up: [N, I] -> [N, H]."""
        if not torch.is_grad_enabled():
            return F.linear(_gated(gate, up), self.weight, self.bias)
        product: Tensor = _GatedLinear.apply(gate, up, self.weight)
        return product if self.bias is None else product + self.bias


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    wide = x.to(widened(x.dtype))
    cos, sin = cos.to(wide.dtype).unsqueeze(1), sin.to(wide.dtype).unsqueeze(1)
    out = wide * cos
    out[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-direction)
    out[..., half:].addcmul_(wide[..., :half], sin[..., half:], value=direction)
    return out.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to the pairs (i, i + D / 2), as Llama and Qwen do.

    Args:
        x: [N, heads, D].
        cos, sin: float32 [N, D], both halves equal, already multiplied by the scaling's attention factor.
    """
    if not torch.is_grad_enabled():
        return _turn(x, cos, sin, 1)
    return _Rotate.apply(x, cos, sin)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to the pairs (2i, 2i + 1), as DeepSeek does.

    The result has the pairs' entries in two halves. Queries and keys are reordered in the same way, so their
    products are those of the interleaved order.

    Args:
        x: [N, heads, D].
        cos, sin: see `rotate`.
    """
    return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)
