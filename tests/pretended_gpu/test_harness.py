"""The pretended GPU records what a GPU's host waits for, and refuses what a GPU refuses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from tests.pretended_gpu.device import CUDA, PretendedGpu


def on_gpu(*shape: int) -> Tensor:
    return torch.zeros(shape, device=CUDA)


WAITS: dict[str, Callable[[], object]] = {
    "read": lambda: bool(on_gpu()) or on_gpu(1).tolist(),
    "to host": lambda: on_gpu(2).cpu(),
    "shape": lambda: on_gpu(2)[on_gpu(2) > 0],
    "from host": lambda: torch.tensor([1, 2], device=CUDA),
    "pageable": lambda: torch.zeros(2).to(CUDA, non_blocking=True),
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_wait_is_recorded_and_fails_where_none_is_allowed(kind: str) -> None:
    with PretendedGpu() as gpu:
        with pytest.raises((AssertionError, DynamicOutputShapeException)), gpu.no_waiting():
            WAITS[kind]()
        assert {wait[0] for wait in gpu.waits} == {kind}
        assert "test_harness.py" in gpu.waits[0][2]
