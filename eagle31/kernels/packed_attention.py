"""Attention to the step-0 keys by the flash kernel for CUDA: one call for all runs."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.query_run import QueryRun

kernels = torch.ops.aten


def can_pack(like: Tensor, head_dim: int) -> bool:
    """Return whether the kernel supports this device, dtype and head size."""
    narrow = like.dtype in (torch.bfloat16, torch.float16)
    return like.is_cuda and narrow and head_dim % 8 == 0 and head_dim <= 256


class PackedBlock:
    """A causal block that is one call of the kernel for sequences of different lengths.

    Where a run has more keys than queries, the kernel aligns the causal mask to the last query and the last
    key. That is what a run is: its queries are the last rows of its keys. The kernel has one width for
    queries, keys and values, so narrower values are padded with zeros and their output is cut.

    Args:
        runs: those of step 0; every step keeps their lengths.
        scale: multiplies the scores.
    """

    def __init__(self, runs: Sequence[QueryRun], device: torch.device, scale: float) -> None:
        self.scale = scale
        self.row_index: Tensor | None = None
        self.num_rows = runs[-1].query_stop if runs else 0
        query_lengths = [run.num_queries for run in runs]
        key_lengths = [run.num_keys for run in runs]
        self.query_offsets = _offsets(query_lengths, device)
        self.key_offsets = _offsets(key_lengths, device)
        self.longest = max(query_lengths, default=0), max(key_lengths, default=0)
        self.gather = _gather(runs, device)

    def for_rows(self, row_index: Tensor | None) -> "PackedBlock":
        """Return the block of a later step, which leaves out some rows of step 0.

        Args:
            row_index: int64 [R], the step's rows within those of step 0; None when they are the same.
        """
        block = copy(self)
        block.row_index = row_index
        return block

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        width = values.shape[-1]
        if not self.num_rows:
            empty = query.new_empty(*query.shape[:2], width)
            return empty, query.new_empty(query.shape[:2], dtype=torch.float32)
        output, lse, *_ = kernels._flash_attention_forward(
            self._spread(query),
            self._packed(keys),
            _widen(self._packed(values), query),
            self.query_offsets,
            self.key_offsets,
            *self.longest,
            0.0,  # dropout
            True,  # causal
            False,  # debug mask
            scale=self.scale,
        )
        output, lse = output[..., :width], lse.t()  # the kernel's [Hq, R]
        return (output, lse) if self.row_index is None else (output[self.row_index], lse[self.row_index])

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self.num_rows:
            return torch.zeros_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        # Only dropout would read the kernel's random state.
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grad_query, grad_keys, grad_values = kernels._flash_attention_backward(
            _widen(self._spread(grad), query),
            self._spread(query),
            self._packed(keys),
            _widen(self._packed(values), query),
            _widen(self._spread(output), query),
            self._spread(lse).t().contiguous(),
            self.query_offsets,
            self.key_offsets,
            *self.longest,
            0.0,
            True,
            random_state,
            torch.zeros((), dtype=torch.uint64, device=query.device),
            scale=self.scale,
        )
        grad_values = grad_values[..., : values.shape[-1]]
        if self.row_index is not None:
            grad_query = grad_query[self.row_index]
        return grad_query, self._unpacked(grad_keys, keys), self._unpacked(grad_values, values)

    def _spread(self, x: Tensor) -> Tensor:
        """Place this step's rows among those of step 0, with zeros elsewhere.

        A row of zeros with a zero gradient adds nothing to the gradient of any key or value.
        """
        if self.row_index is None:
            return x.contiguous()
        return x.new_zeros(self.num_rows, *x.shape[1:]).index_copy_(0, self.row_index, x)

    def _packed(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.gather is None else x[self.gather]

    def _unpacked(self, grad: Tensor, like: Tensor) -> Tensor:
        return grad if self.gather is None else torch.zeros_like(like).index_add_(0, self.gather, grad)


def _widen(x: Tensor, like: Tensor) -> Tensor:
    """Pad `x` with zeros to the last dimension of `like`."""
    missing = like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the cumulative lengths, int32 [len(lengths) + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32, non_blocking=True)


def _gather(runs: Sequence[QueryRun], device: torch.device) -> Tensor | None:
    """Return the indices of the keys run by run; None when the runs' keys follow one another without gaps."""
    starts, stops = [run.key_start for run in runs], [run.key_stop for run in runs]
    if starts == [0, *stops[:-1]]:
        return None
    parts = [torch.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
    return torch.cat(parts).to(device, non_blocking=True) if parts else None
