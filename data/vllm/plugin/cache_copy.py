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
    finished: Callable[[], bool]
    wait: Callable[[], None]


class CacheReader:
    """Copies the states of finished requests; on CUDA, in a stream that runs next to vLLM's.

    Args:
        cache: [num_blocks, L, block_size, Ht], the cache that vLLM registers.
    """

    def __init__(self, cache: Tensor) -> None:
        self._blocks = cache.transpose(1, 2)  # [num_blocks, block_size, L, Ht]
        self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None

    def bytes_of(self, num_tokens: int) -> int:
        return num_tokens * self._blocks.shape[2:].numel() * self._blocks.element_size()

    def copy(self, block_ids: Sequence[int], num_tokens: int) -> HostCopy:
        """Copy the first `num_tokens` states of the blocks, which must not change until it has finished."""
        num_blocks = -(-num_tokens // self._blocks.shape[1])
        assert len(block_ids) >= num_blocks, "vLLM gave fewer blocks than the prompt takes"
        if self._stream is None:
            states = self._blocks[torch.tensor(block_ids[:num_blocks])].flatten(0, 1)[:num_tokens]
            return HostCopy(states, lambda: True, lambda: None)
        return self._copy_from_device(torch.tensor(block_ids[:num_blocks]), num_tokens)

    def _copy_from_device(self, block_ids: Tensor, num_tokens: int) -> HostCopy:
        assert self._stream is not None
        block_size = self._blocks.shape[1]
        per_piece = max(1, _PIECE_BYTES // self.bytes_of(block_size))
        shape = (num_tokens, *self._blocks.shape[2:])
        states = torch.empty(shape, dtype=self._blocks.dtype, pin_memory=True)
        # The states were written on the stream that is current here.
        self._stream.wait_stream(torch.cuda.current_stream(self._blocks.device))
        with torch.cuda.stream(self._stream):
            indices = block_ids.pin_memory().to(self._blocks.device, non_blocking=True)
            for first in range(0, len(block_ids), per_piece):
                start = first * block_size
                piece = self._blocks[indices[first : first + per_piece]].flatten(0, 1)[: num_tokens - start]
                states[start : start + len(piece)].copy_(piece, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return HostCopy(states, event.query, event.synchronize)
