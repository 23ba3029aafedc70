"""RMSNorm, SwiGLU's down projection and RoPE with short backward passes.

Autograd's backward passes of these memory-bound operations read their operands many times. The ones here
read them once or twice and save only the inputs. On CUDA, norms and SwiGLU are Liger-Kernel's, apart from the
norm's backward pass.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle31.kernels import dispatch
from eagle31.kernels.step_sums import WeightSum, step_sum


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(widened(x.dtype))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = (norm.square_().div_(x.shape[-1]).add_(eps)).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

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


class _TritonRMSNorm(torch.autograd.Function):
    """The norm; with a residual, the sum with it and the sum's norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        sums: tuple[WeightSum, bool] | None,
    ) -> Any:
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
        from liger_kernel.ops.rms_norm import rms_norm_forward

        if residual is None:
            normed, x, inverse, *_ = rms_norm_forward(x, weight, eps, 0.0, "llama", None)
        else:
            normed, x, inverse, *_ = fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "llama")
        ctx.save_for_backward(x, weight, inverse)
        ctx.sum, ctx.is_first = sums or (WeightSum(), True)
        return normed if residual is None else (x, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from eagle31.kernels.norm_backward import norm_backward

        x, weight, inverse = ctx.saved_tensors
        grad, shape = grads[-1].contiguous(), grads[-1].shape
        of_sum = grads[0].contiguous() if len(grads) == 2 else None
        of_x, _, _, of_residual, _ = ctx.needs_input_grad
        found, ctx.sum.total = norm_backward(
            grad.flatten(0, -2),
            of_sum,
            x.flatten(0, -2),
            weight,
            inverse,
            ctx.sum.total,
            for_input=of_x or of_residual,
        )
        grad_weight = ctx.sum.taken().sum(0).to(weight.dtype) if ctx.is_first else None
        found = None if found is None else found.view(shape)
        return found, grad_weight, None, None if of_sum is None else found, None


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last dimension of [..., H], computed in float32 or wider."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of x; with a residual, their sum and its norm."""
        assert self.eps is not None
        if dispatch.has_triton(x):
            return _TritonRMSNorm.apply(x, self.weight, self.eps, residual, step_sum(self.weight))
        if residual is not None:
            x = residual + x
        normed = _RMSNorm.apply(x, self.weight, self.eps)
        return normed if residual is None else (x, normed)


class _SummedLinear(torch.autograd.Function):
    """A product whose weight's gradient is added to that of other calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, total: WeightSum, is_first: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sum, ctx.is_first = total, is_first
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return grad @ weight, _added_product(ctx, grad, x), None, None


def _added_product(ctx: Any, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add the weight's gradient to its sum, and return that of all calls in the last one."""
    if ctx.sum.total is None:
        ctx.sum.total = grad.t() @ x
    else:
        ctx.sum.total.addmm_(grad.t(), x)
    return ctx.sum.taken() if ctx.is_first else None


class StepLinear(nn.Linear):
    """A linear layer that the steps of a rollout call."""

    def forward(self, x: Tensor) -> Tensor:
        """Project x. [N, in] -> [N, out]."""
        total = step_sum(self.weight)
        if total is None:
            return F.linear(x, self.weight, self.bias)
        product: Tensor = _SummedLinear.apply(x, self.weight, *total)
        return product if self.bias is None else product + self.bias


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, sums: tuple[WeightSum, bool] | None
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.sum, ctx.is_first = sums or (WeightSum(), True)
        return _gated(gate, up) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        if dispatch.has_triton(grad):
            from liger_kernel.ops.swiglu import swiglu_backward

            gated = _gated(gate, up)
            grad_weight = _added_product(ctx, grad, gated)
            # The gradients take the place of gate and up; autograd refuses whatever would read those again.
            gradients = swiglu_backward(gate.detach(), up.detach(), torch.mm(grad, weight, out=gated))
            torch.autograd.graph.increment_version((gate, up))
            return *gradients, grad_weight, None
        active = F.silu(gate)
        gated = active * up
        grad_weight = _added_product(ctx, grad, gated)
        grad_gated = torch.mm(grad, weight, out=gated)
        grad_up = active.mul_(grad_gated)
        return torch.ops.aten.silu_backward(grad_gated.mul_(up), gate), grad_up, grad_weight, None


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    if dispatch.has_triton(gate):
        from liger_kernel.ops.swiglu import swiglu_forward

        return swiglu_forward(gate, up)[2]
    return F.silu(gate).mul_(up)


class GatedLinear(nn.Linear):
    """The down projection of a SwiGLU.

    It saves neither silu(gate) nor the product that it projects; the backward pass computes them again.
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        """Return (silu(gate) * up) @ weight.T + bias. gate, up: [N, I] -> [N, H]."""
        if not torch.is_grad_enabled():
            return F.linear(_gated(gate, up), self.weight, self.bias)
        product: Tensor = _GatedLinear.apply(gate, up, self.weight, step_sum(self.weight))
        return product if self.bias is None else product + self.bias


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return _turned(x, cos, sin, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, ctx.pairs, backward=True), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool, backward: bool = False) -> Tensor:
    if dispatch.has_triton(x):
        from eagle31.kernels.rotation import turn

        return turn(x, cos, sin, pairs, backward)
    plain, x = x.tensor_split([x.shape[-1] - cos.shape[-1]], dim=-1)
    if pairs and not backward:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    half, direction = x.shape[-1] // 2, -1 if backward else 1
    wide = x.to(widened(x.dtype))
    cos, sin = cos.to(wide.dtype).unsqueeze(1), sin.to(wide.dtype).unsqueeze(1)
    out = wide * cos
    out[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-direction)
    out[..., half:].addcmul_(wide[..., :half], sin[..., half:], value=direction)
    x = out.to(x.dtype)
    if pairs and backward:
        x = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((plain, x), dim=-1) if plain.shape[-1] else x


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool = False) -> Tensor:
    """Apply rotary position embedding.

    Args:
        x: [N, heads, D], of which the last W entries are rotated.
        cos, sin: float32 [N, W], both halves equal, already multiplied by the scaling's attention factor.
        pairs: rotate the pairs (2i, 2i + 1), as DeepSeek does, not (i, i + W / 2), as Llama and Qwen do. The
            result has the pairs' entries in two halves. Queries and keys are reordered in the same way, so
            their products are those of the interleaved order.
    """
    return _Rotate.apply(x, cos, sin, pairs)
