"""The rows of a rollout step as calls of the flash kernel for CUDA.

The private operations of aten stay: `torch.nn.attention.varlen` has no public backward pass that takes
another output and log-sum-exp than its own.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

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


@dataclass(frozen=True)
class PackedBlock:
    """The rows of a step, and the few calls of the kernel that are their attention to the step-0 keys.

    Where a run has more keys than queries, the kernel aligns the causal mask to the last query and the last
    key. That is what a run is: its queries are the last rows of its keys. One call takes the keys of many
    documents as they are in memory. A document's next run reads the same keys again, so it starts another
    call, and no key is copied.

    The kernel has one width for queries, keys and values, which is a multiple of 8; FlashAttention 3 also has
    MLA's. Narrower ones are padded with zeros and the results are cut.

    The sums over the calls have a fixed order. The kernel itself sums the gradients of queries in the order
    in which its blocks finish, unless `torch.use_deterministic_algorithms` is set.
    """

    calls: Sequence[_Call]  # none where the step's window has no step-0 key
    window: dict[str, int]  # the kernel's arguments
    # The queries' places among the rows that the kernel computes, int64 [R], and the query of each of these
    # rows or -1, int64 [P]; None when they are the same.
    places: Tensor | None
    sources: Tensor | None
    # int64 [R], the queries' rows within those of step 0; None when they are the same.
    first_index: Tensor | None
    read_steps: tuple[int, int]  # the first rollout step that the window reads, and the step itself
    scale: float  # of the scores
    random_state: Tensor  # of the kernel, which only dropout would read

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [P, Hq, W] and log-sum-exp [Hq, P] of queries [P, Hq, W] and keys [S, Hkv, W]."""
        outputs, sums = [], []
        for call in self.calls:
            output, lse, *_ = kernels._flash_attention_forward(
                query[call.queries],
                keys[call.keys],
                values[call.keys],
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
        return _joined(outputs), _joined(sums, dim=1)

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
        """Return the query's gradient [P, Hq, W], and add those of keys and values to `sums`."""
        parts = []
        for call in self.calls:
            part, *of_keys = kernels._flash_attention_backward(
                grad[call.queries],
                query[call.queries],
                keys[call.keys],
                values[call.keys],
                output[call.queries],
                lse[:, call.queries].contiguous(),
                call.query_offsets,
                call.key_offsets,
                *call.longest,
                0.0,
                True,
                self.random_state,
                self.random_state[0],
                scale=self.scale,
                **self.window,
            )
            parts.append(part)
            for total, found in zip(sums, of_keys, strict=True):
                total[call.keys].add_(found[..., : total.shape[-1]])
        return _joined(parts)


def packed_blocks(
    runs: Sequence[Sequence[QueryRun]],
    first_indices: Sequence[Tensor | None],
    windows: Sequence[int | None],
    first_steps: Sequence[int],
    scale: float,
    device: torch.device,
) -> list[PackedBlock]:
    """Return the block of each step.

    Args:
        runs: of each step's queries; those of step 0 have all rows of the others.
        first_indices: int64 [R] for each step, its rows within those of step 0; None when they are the same.
        windows: for each step the number of step-0 keys that a query reads, its own included; None for all.
        first_steps: for each step k the first of the steps 1..k whose keys its window has.
        scale: multiplies the scores.
    """
    spans = _spans(runs[0])
    num_places = spans[-1].query_stop if spans else 0
    places = [_places(of_step, spans) for of_step in runs]
    moved: list[Tensor | None] = [None] * (2 * len(runs))
    changed = [step for step, found in enumerate(places) if len(found) != num_places]
    pairs = [x for step in changed for x in (places[step], _sources(places[step], num_places))]
    for number, tensor in enumerate(to_device(pairs, device)):
        moved[2 * changed[number // 2] + number % 2] = tensor
    calls = _calls(spans, device)
    random_state = torch.zeros(2, dtype=torch.uint64, device=device)
    blocks = []
    for step, window in enumerate(windows):
        has_keys = window != 0 and len(places[step]) > 0
        of_step, sources = moved[2 * step : 2 * step + 2] if has_keys else (None, None)
        block = PackedBlock(
            calls=calls if has_keys else (),
            # The kernel counts the keys before and after the query's own.
            window={} if window is None else {"window_size_left": window - 1, "window_size_right": 0},
            places=of_step,
            sources=sources,
            first_index=first_indices[step],
            read_steps=(first_steps[step], step),
            scale=scale,
            random_state=random_state,
        )
        blocks.append(block)
    return blocks


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


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


def _places(runs: Sequence[QueryRun], spans: Sequence[QueryRun]) -> Tensor:
    """Return the place of each run's queries among those of the spans, int64 [R]."""
    remaining = iter(spans)
    span, parts = next(remaining, None), [torch.arange(0)]
    for run in runs:
        while span is None or run.key_start != span.key_start or run.key_stop > span.key_stop:
            span = next(remaining)
        stop = span.query_stop - (span.key_stop - run.key_stop)
        parts.append(torch.arange(stop - run.num_queries, stop))
    return torch.cat(parts)


def _sources(places: Tensor, num_places: int) -> Tensor:
    """Return the query of each place, or -1."""
    return torch.full((num_places,), -1).index_copy_(0, places, torch.arange(len(places)))


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


def padded_value_dim(head_dim: int, value_dim: int) -> int:
    """Return the width of a head's values in the flash kernel."""
    if current_flash_attention_impl() == "FA3" and (head_dim, value_dim) == (192, 128):
        return value_dim
    return padded_head_dim(head_dim)


def take_flash_attention_3(device: torch.device) -> None:
    """Have aten's flash operations be FlashAttention 3 where its package, for Hopper, is installed."""
    if find_spec("flash_attn_interface") and torch.cuda.get_device_capability(device) == (9, 0):
        activate_flash_attention_impl("FA3")


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
