"""Tests of kernels can run on a GPU: what a kernel writes there arrives in the tensors of the test."""

from typing import Any

import torch

from tests.eagle31.kernels.conftest import launched_on


def test_a_launch_writes_through_copies_to_the_tensors_and_their_views() -> None:
    found: dict[str, Any] = {}

    def run(kernel: str, first: torch.Tensor, size: int, *, second: torch.Tensor) -> None:
        found.update(kernel=kernel, size=size, pointers={first.data_ptr(), second.data_ptr()})
        first.add_(1)  # the second is a view of the first
        second.mul_(10)

    x = torch.arange(6, dtype=torch.int32).view(2, 3)
    expected = x + 1
    expected[:, 1] *= 10
    launched_on(torch.device("cpu"), run)("kernel", x, 3, second=x[:, 1])
    assert torch.equal(x, expected)
    assert (found["kernel"], found["size"]) == ("kernel", 3)
    assert x.data_ptr() not in found["pointers"]
