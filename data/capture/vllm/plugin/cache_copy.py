"""Copies from vLLM's paged cache to host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE_BYTES = 32 << 20  # gathered at a time on the device, where vLLM leaves little memory


@dataclass(frozen=True)
class HostCopy:
    """Hidden states that are being copied to host memory."""

    states: Tensor  # [T, L, Ht], valid after `wait`
    num_bytes: int  # that it holds
    finished: Callable[[], bool]
    wait: Callable[[], None]


class CacheReader:
    """Copies states that have been computed; on CUDA, in a stream that runs next to vLLM's.

    Host memory comes from PyTorch, which keeps what was pinned before for the next copies.

    Args:
        cache: [num_blocks, L, block_size, Ht], the cache that vLLM registers.
    """

    def __init__(self, cache: Tensor) -> None:
        self.block_size = cache.shape[2]
        self._blocks = cache.transpose(1, 2)  # [num_blocks, block_size, L, Ht]
        self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None

    def bytes_of(self, num_tokens: int) -> int:
        """Return the host memory that a copy takes."""
        num_blocks = -(-num_tokens // self._blocks.shape[1])
        return num_blocks * self._blocks.shape[1:].numel() * self._blocks.element_size()

    def copy(self, block_ids: Sequence[int], num_tokens: int) -> HostCopy:
        """Copy the first `num_tokens` states of the blocks, which must not change until it has finished."""
        num_blocks = -(-num_tokens // self._blocks.shape[1])
        assert len(block_ids) >= num_blocks, "vLLM gave fewer blocks than the prompt takes"
        shape = (num_blocks, *self._blocks.shape[1:])
        blocks = torch.empty(shape, dtype=self._blocks.dtype, pin_memory=self._stream is not None)
        indices, states = torch.tensor(block_ids[:num_blocks]), blocks.flatten(0, 1)[:num_tokens]
        if self._stream is None:
            torch.index_select(self._blocks, 0, indices, out=blocks)
            return HostCopy(states, blocks.nbytes, lambda: True, lambda: None)
        per_piece = max(1, _PIECE_BYTES // (blocks[0].numel() * blocks.element_size()))
        # The states were written on the stream that is current here.
        self._stream.wait_stream(torch.cuda.current_stream(self._blocks.device))
        with torch.cuda.stream(self._stream):
            on_device = indices.pin_memory().to(self._blocks.device, non_blocking=True)
            for first in range(0, num_blocks, per_piece):
                piece = self._blocks[on_device[first : first + per_piece]]
                blocks[first : first + len(piece)].copy_(piece, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return HostCopy(states, blocks.nbytes, event.query, event.synchronize)
