"""Attention to the step-0 keys by the flash kernel for CUDA."""

import warnings
from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.query_run import QueryRun
from eagle31.kernels.transfer import to_device

kernels = torch.ops.aten


# Where two runs of a document are at most this many rows apart, the rows between them are computed too, with
# zeros as queries. That costs less than another call of the kernel.
LARGEST_GAP = 64
LARGEST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8  # narrower heads are padded


class _Call(NamedTuple):
    """A call of the kernel: documents whose queries and keys follow one another without gaps."""

    queries: slice
    keys: slice
    query_offsets: Tensor  # int32, cumulative numbers of queries
    key_offsets: Tensor  # int32, cumulative numbers of keys
    longest: tuple[int, int]  # the largest number of queries and of keys


class PackedBlock:
    """A causal block that is a few calls of the kernel for sequences of different lengths.

    Where a run has more keys than queries, the kernel aligns the causal mask to the last query and the last
    key. That is what a run is: its queries are the last rows of its keys. One call takes the keys of many
    documents as they are in memory. A document's next run reads the same keys again, so it starts another
    call, and no key is copied.

    The kernel has one width for queries, keys and values, which is a multiple of 8. Narrower ones are padded
    with zeros and the results are cut.

    The sums over the calls have a fixed order. The kernel itself sums the gradients of queries in the order
    in which its blocks finish, unless `torch.use_deterministic_algorithms` is set.

    Args:
        runs: those of step 0; every step keeps their lengths.
        scale: multiplies the scores.
    """

    def __init__(self, runs: Sequence[QueryRun], device: torch.device, scale: float) -> None:
        self.scale = scale
        spans = _spans(runs)
        self.num_rows = spans[-1].query_stop if spans else 0
        self.calls = _calls(spans, device)
        self.window: dict[str, int] = {}  # the kernel's arguments
        # int64 [R], the queries' rows among those that the kernel computes; None when they are the same.
        self.row_index: Tensor | None = None
        if runs and self.num_rows != runs[-1].query_stop:
            (self.row_index,) = to_device([_rows_within(runs, spans)], device)

    def for_rows(self, row_index: Tensor | None, window: int | None = None) -> "PackedBlock":
        """Return the block of a step, which leaves out some rows of step 0.

        Args:
            row_index: int64 [R], the step's rows within those of step 0; None when they are the same.
            window: the number of keys that a query reads, its own included; None for all.
        """
        block = copy(self)
        if window is not None:  # the kernel counts the keys before and after the query's own
            block.window = {"window_size_left": window - 1, "window_size_right": 0}
        if row_index is not None:
            block.row_index = row_index if self.row_index is None else self.row_index[row_index]
        return block

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self.num_rows:
            empty = query.new_empty(*query.shape[:2], values.shape[-1])
            return empty, query.new_empty(query.shape[:2], dtype=torch.float32)
        width = padded_head_dim(query.shape[-1])
        spread = _widen(self._spread(query), width)
        wide_keys, wide_values = _widen(keys.contiguous(), width), _widen(values.contiguous(), width)
        outputs, sums = [], []
        for call in self.calls:
            output, lse, *_ = kernels._flash_attention_forward(
                spread[call.queries],
                wide_keys[call.keys],
                wide_values[call.keys],
                call.query_offsets,
                call.key_offsets,
                *call.longest,
                0.0,  # dropout
                True,  # causal
                False,  # debug mask
                scale=self.scale,
                **self.window,
            )
            outputs.append(output)
            sums.append(lse)
        output = _joined(outputs)[..., : values.shape[-1]]
        lse = _joined(sums, dim=1).t()  # the kernel's [Hq, R]
        return (output, lse) if self.row_index is None else (output[self.row_index], lse[self.row_index])

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        lse: Tensor,
        sums: tuple[Tensor, Tensor],
    ) -> Tensor:
        if not self.num_rows:
            return torch.zeros_like(query)
        width = padded_head_dim(query.shape[-1])
        spread, grad, output = (_widen(self._spread(x), width) for x in (query, grad, output))
        wide_keys, wide_values = _widen(keys.contiguous(), width), _widen(values.contiguous(), width)
        lse = self._spread(lse)
        # Only dropout would read the kernel's random state.
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused = torch.zeros((), dtype=torch.uint64, device=query.device)
        parts = []
        for call in self.calls:
            part, *of_keys = kernels._flash_attention_backward(
                grad[call.queries],
                spread[call.queries],
                wide_keys[call.keys],
                wide_values[call.keys],
                output[call.queries],
                lse[call.queries].t().contiguous(),
                call.query_offsets,
                call.key_offsets,
                *call.longest,
                0.0,
                True,
                random_state,
                unused,
                scale=self.scale,
                **self.window,
            )
            parts.append(part)
            for total, found in zip(sums, of_keys, strict=True):
                total[call.keys] += found[..., : total.shape[-1]]
        grad_query = _joined(parts)[..., : query.shape[-1]]
        return grad_query if self.row_index is None else grad_query[self.row_index]

    def _spread(self, x: Tensor) -> Tensor:
        """Place this step's rows among those that the kernel computes, with zeros elsewhere.

        A row of zeros with a zero gradient adds nothing to the gradient of any key or value.
        """
        if self.row_index is None:
            return x.contiguous()
        return x.new_zeros(self.num_rows, *x.shape[1:]).index_copy_(0, self.row_index, x)


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _widen(x: Tensor, width: int) -> Tensor:
    """Pad the last dimension of `x` with zeros."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _spans(runs: Sequence[QueryRun]) -> list[QueryRun]:
    """Join runs of one document across small gaps; the result's queries include the rows in the gaps."""
    spans: list[QueryRun] = []
    added = 0  # rows in gaps so far
    for run in runs:
        if spans and spans[-1].key_start == run.key_start:
            before = spans[-1]
            gap = run.key_stop - run.num_queries - before.key_stop
            if gap <= LARGEST_GAP:
                added += gap
                spans[-1] = before._replace(query_stop=run.query_stop + added, key_stop=run.key_stop)
                continue
        spans.append(run._replace(query_start=run.query_start + added, query_stop=run.query_stop + added))
    return spans


def _rows_within(runs: Sequence[QueryRun], spans: Sequence[QueryRun]) -> Tensor:
    """Return the row of each run's queries among those of the spans, int64 [R]."""
    remaining = iter(spans)
    span, parts = next(remaining), []
    for run in runs:
        while run.key_start != span.key_start or run.key_stop > span.key_stop:
            span = next(remaining)
        stop = span.query_stop - (span.key_stop - run.key_stop)
        parts.append(torch.arange(stop - run.num_queries, stop))
    return torch.cat(parts)


def _calls(spans: Sequence[QueryRun], device: torch.device) -> list[_Call]:
    """Group spans into calls; one whose keys do not follow those of the span before starts the next call."""
    groups: list[list[QueryRun]] = []
    for span in spans:
        if groups and span.key_start == groups[-1][-1].key_stop:
            groups[-1].append(span)
        else:
            groups.append([span])
    lengths = [([x.num_queries for x in group], [x.num_keys for x in group]) for group in groups]
    offsets = to_device([_offsets(x) for pair in lengths for x in pair], device)
    return [
        _Call(
            slice(group[0].query_start, group[-1].query_stop),
            slice(group[0].key_start, group[-1].key_stop),
            *pair,
            longest=(max(num_queries), max(num_keys)),
        )
        for group, pair, (num_queries, num_keys) in zip(
            groups, zip(offsets[::2], offsets[1::2], strict=True), lengths, strict=True
        )
    ]


def _offsets(lengths: Sequence[int]) -> Tensor:
    """Return the cumulative lengths, int32 [len(lengths) + 1]."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def padded_head_dim(head_dim: int) -> int:
    """Return the width of a head in the flash kernel."""
    return -(-head_dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def flash_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the flash kernel cannot train heads of this width on a CUDA device, or None if it can.

    Source: FlashAttention-2's requirements, as `sdp_utils.cpp` of PyTorch checks them.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim > LARGEST_HEAD_DIM:
        return f"the kernel has heads of at most {LARGEST_HEAD_DIM}, not {head_dim}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of PyTorch does not have the kernel"
    card = torch.cuda.get_device_properties(device)
    capability = (card.major, card.minor)
    if capability < (8, 0):
        return f"the kernel needs compute capability 8.0, and the card has {card.major}.{card.minor}"
    small_memory = (8, 6) <= capability <= (8, 9) or card.major == 12
    if small_memory and 192 < padded_head_dim(head_dim) <= 224:
        return f"on compute capability {card.major}.{card.minor} the kernel cannot train heads of {head_dim}"
    return None


@cache
def warn_once(device: torch.device, obstacle: str) -> None:
    """Warn, once for each reason, that attention is computed without the flash kernel."""
    name = torch.cuda.get_device_properties(device).name
    warnings.warn(
        f"{name}: attention is computed by matrix products, which is slower than FlashAttention: {obstacle}.",
        stacklevel=2,
    )
