"""The short backward passes compared with autograd's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.elementwise import GatedLinear, RMSNorm, rotate

ROWS, WIDTH = 9, 12


def compare(
    fast: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> None:
    """Compare values and gradients of `fast` in `dtype` with those of `plain` in float64."""
    narrow = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in narrow]
    found, expected = fast(*narrow), plain(*exact)
    grad = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    assert found.dtype == dtype
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    pairs = zip(
        [found, *torch.autograd.grad(found, narrow, grad)],
        [expected, *torch.autograd.grad(expected, exact, grad.double())],
        strict=True,
    )
    for one, other in pairs:
        assert one.dtype == dtype
        torch.testing.assert_close(
            one.double(), other, rtol=bound, atol=bound * float(other.detach().abs().max())
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(WIDTH, eps=1e-2)

    def fast(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, x)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight

    compare(fast, plain, [torch.randn(ROWS, WIDTH), torch.randn(WIDTH)], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotate(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    angles = torch.randn(ROWS, WIDTH // 2).repeat(1, 2)
    cos, sin = angles.cos() * 1.1, angles.sin() * 1.1

    def plain(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous())
        turned = pairs * torch.complex(cos, sin)[:, None, : WIDTH // 2]
        return torch.cat((turned.real, turned.imag), -1)

    compare(lambda x: rotate(x, cos, sin), plain, [torch.randn(ROWS, 3, WIDTH)], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gated_linear(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    linear = GatedLinear(WIDTH, 5, bias=False)

    def fast(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(linear, {"weight": weight}, (gate, up))

    def plain(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return (F.silu(gate) * up) @ weight.T

    inputs = [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(5, WIDTH)]
    compare(fast, plain, inputs, dtype)


def test_a_norm_whose_input_needs_no_gradient_trains_its_weight() -> None:
    norm = RMSNorm(WIDTH, eps=1e-12)
    norm(torch.ones(ROWS, WIDTH)).sum().backward()
    assert norm.weight.grad is not None
    torch.testing.assert_close(norm.weight.grad, torch.full((WIDTH,), float(ROWS)))
