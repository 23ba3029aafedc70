"""On PYTHONPATH, lets TorchSpec's HF engine and its Mooncake store run where there is no CUDA.

Their code calls CUDA in these places only, none of which changes a number: device selection, pinned memory,
and a copy stream with its events. All else, from the target's hooks to the bytes in the store, is their own.
"""

import contextlib
import sys
from types import SimpleNamespace
from typing import Any


class _Stream:
    device = SimpleNamespace(index=None)

    def wait_event(self, event: Any) -> None: ...


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _AfterImport:
    """Replaces CUDA's calls just before TorchSpec's store is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchspec.transfer.mooncake.eagle_store":
            replace_cuda()


def replace_cuda() -> None:
    import torch
    from torchspec.transfer.mooncake.store import MooncakeHiddenStateStore

    allocate, setup = torch.empty, MooncakeHiddenStateStore.setup

    def unpinned(*sizes: Any, pin_memory: bool = False, **options: Any) -> Any:
        return allocate(*sizes, **options)

    def with_stream(self: Any, device: Any = None) -> None:
        setup(self)
        self._copy_stream = _Stream()

    torch.empty = unpinned
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.Event = _Event
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self: self
    MooncakeHiddenStateStore.setup = with_stream


sys.meta_path.insert(0, _AfterImport())
