"""Copies from vLLM's paged cache to host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.vllm.plugin.staging import STAGING_BYTES, Region, Staging

_PIECE_BYTES = 32 << 20  # gathered at a time on the device, where vLLM leaves little memory


@dataclass(frozen=True)
class HostCopy:
    """Hidden states that are being copied to host memory."""

    states: Tensor  # [T, L, Ht] in `region`, valid after `wait`
    region: Region
    finished: Callable[[], bool]
    wait: Callable[[], None]


class CacheReader:
    """Copies the states of finished requests; on CUDA, in a stream that runs next to vLLM's.

    Args:
        cache: [num_blocks, L, block_size, Ht], the cache that vLLM registers.
        longest: the number of tokens of the longest prompt.
        staging_bytes: the size of the host memory for copies, which is allocated here; None takes
            `STAGING_BYTES`, or what the longest prompt needs.

    Raises:
        ValueError: the longest prompt does not fit.
    """

    def __init__(self, cache: Tensor, longest: int, staging_bytes: int | None = None) -> None:
        self._blocks = cache.transpose(1, 2)  # [num_blocks, block_size, L, Ht]
        self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None
        needed = self.bytes_of(longest)
        staging_bytes = max(needed, STAGING_BYTES) if staging_bytes is None else staging_bytes
        if staging_bytes < needed:
            raise ValueError(
                f"max_pending_gb must be at least {needed / 1e9:.3f}: a prompt's states must fit."
            )
        self.staging = Staging(staging_bytes, pinned=cache.is_cuda)

    def bytes_of(self, num_tokens: int) -> int:
        """Return the host memory that a copy takes."""
        num_blocks = -(-num_tokens // self._blocks.shape[1])
        return num_blocks * self._blocks.shape[1:].numel() * self._blocks.element_size()

    def copy(self, block_ids: Sequence[int], num_tokens: int, region: Region) -> HostCopy:
        """Copy the first `num_tokens` states of the blocks, which must not change until it has finished.

        Args:
            region: a part of `staging` with `bytes_of(num_tokens)`.
        """
        num_blocks = -(-num_tokens // self._blocks.shape[1])
        assert len(block_ids) >= num_blocks, "vLLM gave fewer blocks than the prompt takes"
        blocks = self.staging.view(region, (num_blocks, *self._blocks.shape[1:]), self._blocks.dtype)
        indices = torch.tensor(block_ids[:num_blocks])
        states = blocks.flatten(0, 1)[:num_tokens]
        if self._stream is None:
            torch.index_select(self._blocks, 0, indices, out=blocks)
            return HostCopy(states, region, lambda: True, lambda: None)
        return self._copy_from_device(indices, blocks, states, region)

    def _copy_from_device(
        self, block_ids: Tensor, blocks: Tensor, states: Tensor, region: Region
    ) -> HostCopy:
        assert self._stream is not None
        per_piece = max(1, _PIECE_BYTES // (blocks[0].numel() * blocks.element_size()))
        # The states were written on the stream that is current here.
        self._stream.wait_stream(torch.cuda.current_stream(self._blocks.device))
        with torch.cuda.stream(self._stream):
            indices = block_ids.pin_memory().to(self._blocks.device, non_blocking=True)
            for first in range(0, len(block_ids), per_piece):
                piece = self._blocks[indices[first : first + per_piece]]
                blocks[first : first + len(piece)].copy_(piece, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return HostCopy(states, region, event.query, event.synchronize)
