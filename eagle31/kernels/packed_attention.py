"""The causal block by the flash kernel for CUDA: all runs in one call, by their cumulative lengths."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.query_run import QueryRun

kernels = torch.ops.aten


def can_pack(like: Tensor, head_dim: int) -> bool:
    """Whether the kernel takes this device, dtype and head size."""
    narrow = like.dtype in (torch.bfloat16, torch.float16)
    return like.is_cuda and narrow and head_dim % 8 == 0 and head_dim <= 256


class PackedBlock:
    """One varlen call. Where a run has more keys than queries, the kernel aligns the causal mask to the last
    of both, which is what a run is: the last rows of its keys.

    The kernel has one width for queries, keys and values: narrower values get zeros, and their output is cut.

    Args:
        runs: those of step 0, whose lengths every step keeps.
        scale: of the scores.
    """

    def __init__(self, runs: Sequence[QueryRun], device: torch.device, scale: float) -> None:
        self.scale = scale
        self.places: Tensor | None = None
        self.num_rows = runs[-1].query_stop if runs else 0
        query_lengths = [run.query_stop - run.query_start for run in runs]
        key_lengths = [run.key_stop - run.key_start for run in runs]
        self.query_offsets = _offsets(query_lengths, device)
        self.key_offsets = _offsets(key_lengths, device)
        self.longest = max(query_lengths, default=0), max(key_lengths, default=0)
        self.gather = _gather(runs, device)

    def for_rows(self, places: Tensor | None) -> "PackedBlock":
        """For a later step, which leaves some rows out: their places in the packed queries stay empty.

        Args:
            places: int64 [R], of the step's rows among those of step 0; None when they are the same.
        """
        block = copy(self)
        block.places = places
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
        return (output, lse) if self.places is None else (output[self.places], lse[self.places])

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
        if self.places is not None:
            grad_query = grad_query[self.places]
        return grad_query, self._unpacked(grad_keys, keys), self._unpacked(grad_values, values)

    def _spread(self, x: Tensor) -> Tensor:
        """This step's rows at their places among those of step 0, zeros elsewhere.

        A row of zeros with a zero gradient gives nothing to any key or value.
        """
        if self.places is None:
            return x.contiguous()
        return x.new_zeros(self.num_rows, *x.shape[1:]).index_copy_(0, self.places, x)

    def _packed(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.gather is None else x[self.gather]

    def _unpacked(self, grad: Tensor, like: Tensor) -> Tensor:
        return grad if self.gather is None else torch.zeros_like(like).index_add_(0, self.gather, grad)


def _widen(x: Tensor, like: Tensor) -> Tensor:
    """With zeros, to the last dimension of `like`."""
    missing = like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 [len(lengths) + 1], as the kernel takes them."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32, non_blocking=True)


def _gather(runs: Sequence[QueryRun], device: torch.device) -> Tensor | None:
    """The keys run by run; None when the runs follow one another, which is one run a document."""
    starts, stops = [run.key_start for run in runs], [run.key_stop for run in runs]
    if starts == [0, *stops[:-1]]:
        return None
    parts = [torch.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
    return torch.cat(parts).to(device, non_blocking=True) if parts else None
