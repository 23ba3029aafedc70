"""The pretended GPU records what a GPU's host waits for, refuses what a GPU refuses, and leaves no trace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorDeviceMismatchError

from tests.pretended_gpu.backward import backward
from tests.pretended_gpu.pretended_gpu import CUDA, PretendedGpu


def on_gpu(*shape: int) -> Tensor:
    return torch.zeros(shape, device=CUDA)


WAITS: dict[str, tuple[str, Callable[[], object]]] = {
    "item": ("read", lambda: on_gpu(2)[0].item()),
    "float": ("read", lambda: float(on_gpu())),
    "a branch": ("read", lambda: bool(on_gpu())),
    "tolist": ("read", lambda: on_gpu(1).tolist()),
    "cpu": ("to host", lambda: on_gpu(2).cpu()),
    "to the host": ("to host", lambda: on_gpu(2).to("cpu")),
    "into pageable memory": ("to host", lambda: torch.zeros(2).copy_(on_gpu(2), non_blocking=True)),
    "nonzero": ("shape", lambda: on_gpu(2).nonzero()),
    "a mask": ("shape", lambda: on_gpu(2)[on_gpu(2) > 0]),
    # A scalar is assigned without waiting from torch 2.15 on.
    "a mask to assign at": ("shape", lambda: on_gpu(2).__setitem__(on_gpu(2) > 0, on_gpu(1))),
    "unique": ("shape", lambda: on_gpu(2).unique()),
    "a list": ("from host", lambda: torch.tensor([1, 2], device=CUDA)),
    "an index on the host": ("from host", lambda: on_gpu(2)[torch.tensor([0])]),
    "a blocking copy": ("from host", lambda: torch.zeros(2).pin_memory().to(CUDA)),
    "a pageable copy": ("pageable", lambda: torch.zeros(2).to(CUDA, non_blocking=True)),
    "another dtype": (
        "pageable",
        lambda: torch.zeros(2).pin_memory().to(CUDA, torch.bfloat16, non_blocking=True),
    ),
    "synchronize": ("synchronize", lambda: torch.cuda.synchronize()),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_waits_for_is_recorded(name: str) -> None:
    kind, call = WAITS[name]
    with PretendedGpu() as gpu:
        try:
            call()
        except DynamicOutputShapeException:
            assert kind == "shape"
        assert {wait.kind for wait in gpu.waits} == {kind}
        assert "test_harness.py" in gpu.waits[0].place


def test_what_needs_no_waiting_is_not_recorded() -> None:
    with PretendedGpu() as gpu, gpu.no_waiting():
        pinned = torch.arange(4, dtype=torch.float32).pin_memory()
        moved = pinned[1:].to(CUDA, non_blocking=True)
        torch.empty(3, pin_memory=True).copy_(moved, non_blocking=True)
        weight = torch.randn(3, 3, device=CUDA, requires_grad=True)
        backward((moved @ weight)[torch.arange(2, device=CUDA)].square().sum())
        assert weight.grad is not None
        assert weight.grad.device == CUDA
        # The host's tensors are real: their values can be read.
        assert pinned.sum().item() == 6
        assert torch.nonzero(pinned > 1).tolist() == [[2], [3]]


def test_mixed_devices_and_generators_are_refused() -> None:
    with PretendedGpu():
        generator = torch.Generator(CUDA).manual_seed(0)
        assert torch.rand(2, generator=generator, device=CUDA).device == CUDA
        with pytest.raises(FakeTensorDeviceMismatchError):
            on_gpu(2) + torch.zeros(2)
        with pytest.raises(RuntimeError, match="device type for generator"):
            torch.rand((), generator=generator)
        with pytest.raises(RuntimeError, match="device type for generator"):
            torch.multinomial(on_gpu(2), 1, generator=torch.Generator().manual_seed(0))


def test_a_wait_fails_where_none_is_allowed() -> None:
    with PretendedGpu() as gpu:
        with gpu.no_waiting(allowed=1):
            on_gpu(1).item()
        with pytest.raises(AssertionError, match="_local_scalar_dense"), gpu.no_waiting():
            on_gpu(1).item()
        with pytest.raises(AssertionError, match="pageable"), gpu.no_waiting(allowed=1):
            torch.zeros(2).to(CUDA, non_blocking=True)


def test_backward_gives_what_autograd_gives() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.LayerNorm(4))
    x = torch.randn(5, 3)
    out = layers(x)
    loss = (out[:, 1:] * out[torch.tensor([0, 0, 1, 2, 3]), :3]).sum() + out.expand(2, 5, 4).sum()
    expected = torch.autograd.grad(loss, list(layers.parameters()), retain_graph=True)
    backward(loss)
    for parameter, gradient in zip(layers.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_nothing_is_left_of_it() -> None:
    with PretendedGpu():
        pass
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|cuda|NVIDIA"):
        torch.zeros(2, device="cuda")
    assert type(torch.Generator()) is torch.Generator
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    assert weight.grad is not None
