"""Host memory that is used again: the kernel gives new memory at less than the speed of a disk."""

import threading
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

_SMALLEST_BYTES = 1 << 20
_ALIGNMENT = 64


class Buffers:
    """Blocks of memory by size, each a power of two. What is given back is taken again first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> Tensor:
        """Return a block of at least this size, uint8. Pages that nobody writes to take no memory."""
        size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            if self._spare[size]:
                return self._spare[size].pop()
        return torch.empty(size, dtype=torch.uint8)

    def give(self, block: Tensor) -> None:
        """Return a block, which nothing reads any more."""
        with self._lock:
            self._spare[block.nbytes].append(block)

    def copy(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return copies of tensors on the host, and the block that holds them."""
        block = self.take(sum(tensor.nbytes + _ALIGNMENT for tensor in tensors.values()))
        copies, start = {}, 0
        for name, tensor in tensors.items():
            copies[name] = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name].copy_(tensor)
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return copies, block
