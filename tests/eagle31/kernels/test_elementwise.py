"""The short backward passes, and the kernels for GPUs, compared with autograd's."""

import tests.eagle31.kernels.interpreted  # noqa: F401 - before the kernels

# ruff: isort: split
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels import dispatch
from eagle31.kernels.elementwise import GatedLinear, RMSNorm, rotate

ROWS, WIDTH = 9, 12
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# dtype, and whether the kernels for GPUs compute. Liger's multiply bfloat16, which the interpreter cannot.
KINDS = [(FP64, False), (FP32, False), (BF16, False), (FP32, True), (FP16, True)]


@pytest.fixture(params=KINDS, ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    of_operands, on_gpu = request.param
    monkeypatch.setattr(dispatch, "has_triton", lambda _: on_gpu)
    return of_operands


def compare(
    fast: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> None:
    """Compare values and gradients of `fast` in `dtype` with those of `plain` in float64."""
    narrow = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in narrow]
    found, expected = fast(*narrow), plain(*exact)
    grad = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    assert found.dtype == dtype
    bound = {FP64: 1e-12, FP32: 1e-5, FP16: 5e-3, BF16: 3e-2}[dtype]
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


def test_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(WIDTH, eps=1e-2)

    def fast(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, x)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight

    compare(fast, plain, [torch.randn(ROWS, WIDTH), torch.randn(WIDTH)], dtype)


def test_rms_norm_of_a_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    norm = RMSNorm(WIDTH, eps=1e-2)

    def fast(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(torch.func.functional_call(norm, {"weight": weight}, (x, residual)))

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        x = x + residual
        return torch.cat((x, x / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight))

    compare(fast, plain, [*torch.randn(2, ROWS, WIDTH), torch.randn(WIDTH)], dtype)


def test_rotate(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    angles = torch.randn(ROWS, WIDTH // 2).repeat(1, 2)
    cos, sin = angles.cos() * 1.1, angles.sin() * 1.1

    def plain(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous())
        turned = pairs * torch.complex(cos, sin)[:, None, : WIDTH // 2]
        return torch.cat((turned.real, turned.imag), -1)

    def in_pairs(x: Tensor) -> Tensor:
        first, turned = x.split((3, WIDTH), -1)
        return torch.cat((first, plain(turned.unflatten(-1, (-1, 2)).mT.flatten(-2))), -1)

    compare(lambda x: rotate(x, cos, sin), plain, [torch.randn(ROWS, 3, WIDTH)], dtype)
    compare(lambda x: rotate(x, cos, sin, pairs=True), in_pairs, [torch.randn(ROWS, 2, 3 + WIDTH)], dtype)


def test_gated_linear(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    linear = GatedLinear(WIDTH, 5, bias=False)

    def fast(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(linear, {"weight": weight}, (gate, up))

    def plain(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return (F.silu(gate) * up) @ weight.T

    inputs = [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(5, WIDTH)]
    compare(fast, plain, inputs, dtype)
