"""The memory that a computation takes on the pretended GPU."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pretended_gpu.device import CUDA


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of what is allocated inside on the GPU, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        # Its outputs that are not its inputs.
        if not func.is_view and "out" not in (kwargs or {}) and not func._schema.is_mutable:
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor) and x.device == CUDA:
                    self._add(x.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.remove(key)
        self.now -= size
