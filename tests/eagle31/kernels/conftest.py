"""Runs the tests of interpreted kernels on a GPU, which `scripts/gpu_check` asks for.

Their tensors stay on the CPU: a launch copies them to the GPU, runs the compiled kernel, and copies them
back.
"""

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

ON_GPU = os.environ.get("EAGLE31_GPU_CHECK_DEVICE") == "cuda" and torch.cuda.is_available()
if ON_GPU:
    # The tests import the module that has Triton interpret the kernels; here it does nothing.
    sys.modules["tests.eagle31.kernels.interpreted"] = ModuleType("tests.eagle31.kernels.interpreted")


@pytest.fixture(autouse=ON_GPU)
def launches_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "run", launched_on(torch.device("cuda"), JITFunction.run))


def launched_on(device: torch.device, run: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that launches a kernel with copies of its tensors on a device."""

    def launch(kernel: Any, *arguments: Any, **options: Any) -> None:
        # By storage, so that views of one tensor are views of one copy.
        storages: dict[int, tuple[Tensor, Tensor]] = {}

        def copied(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            storage = x.untyped_storage()
            if storage.data_ptr() not in storages:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                storages[storage.data_ptr()] = whole, whole.to(device, copy=True)
            there = storages[storage.data_ptr()][1].untyped_storage()
            empty = torch.empty(0, dtype=x.dtype, device=device)
            return empty.set_(there, x.storage_offset(), x.shape, x.stride())

        run(kernel, *map(copied, arguments), **{key: copied(x) for key, x in options.items()})
        for here, there in storages.values():
            here.copy_(there)

    return launch
