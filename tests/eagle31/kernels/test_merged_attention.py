"""Merged attention compared with attention by its definition."""

import pytest
import torch
from torch import Tensor

from eagle31.kernels.merged_attention import merged_attention
from eagle31.kernels.plain_attention import LayerKeys, attention_weights, weighted_values
from eagle31.kernels.query_run import context_window
from eagle31.kernels.tiled_attention import TILE, FlashKernel, Kernel, PlainKernel, TiledBlock, tile_mask
from eagle31.training.schedule import RolloutSchedule, schedule_rollout

DIM = 6
SCALE = 0.4  # other than DIM ** -0.5
STEPS = 4


def random_supervised(total: int, document_ids: Tensor, seed: int) -> Tensor:
    """Return runs of supervised rows that lose some rows from step to step."""
    generator = torch.Generator().manual_seed(seed)
    first = (torch.rand(total, generator=generator) < 0.1).long().cumsum(0) % 2 == 1
    columns = [first & (document_ids >= 0)]
    for _ in range(STEPS - 1):
        columns.append(columns[-1] & (torch.rand(total, generator=generator) < 0.9))
    return torch.stack(columns, 1)


def visible_keys(query_rows: Tensor, document_ids: Tensor, before: int) -> Tensor:
    """Return bool [R, T]: a row reads the keys of its document at most `before` rows before it."""
    key_rows = torch.arange(len(document_ids))
    same = document_ids[query_rows].unsqueeze(1) == document_ids.unsqueeze(0)
    distance = query_rows.unsqueeze(1) - key_rows.unsqueeze(0)
    return same & (distance >= 0) & (distance <= before)


def reference(
    tensors: list[Tensor],
    schedule: RolloutSchedule,
    step: int,
    document_ids: Tensor,
    window: int | None = None,
) -> Tensor:
    query, keys, values, *rollout = tensors
    rows = schedule.chunks[0].steps[step].rows
    before = len(document_ids) if window is None else window - 1 - step
    visible = visible_keys(rows, document_ids, before)[:, schedule.key_rows]
    rollout = [x[row_index(schedule, step, i % step + 1)] for i, x in enumerate(rollout)]
    seen = range(step) if window is None else range(max(0, step - window), step)
    rollout_keys, rollout_values = ([rollout[i] for i in seen], [rollout[step + i] for i in seen])
    weights = attention_weights(query, keys, visible, rollout_keys, SCALE)
    return weighted_values(weights, values, rollout_values)


def row_index(schedule: RolloutSchedule, step: int, earlier: int) -> Tensor:
    return torch.searchsorted(schedule.chunks[0].steps[earlier].rows, schedule.chunks[0].steps[step].rows)


def block_of(name: str, schedule: RolloutSchedule, step: int, window: int | None = None) -> TiledBlock:
    context = context_window(window, step)
    kernel: Kernel = FlashKernel(SCALE) if name == "flash" else PlainKernel(SCALE)
    longest = max(run.key_stop - run.key_start for run in schedule.chunks[0].steps[0].runs)
    mask = None if context == 0 else tile_mask(longest, torch.zeros(0, dtype=torch.float64), context)
    return TiledBlock(schedule.chunks[0].steps[step].runs, mask, context, kernel)


# The windows are shorter than the draft, than most documents, and longer than a tile. Odd ones are without
# the keys that no query reaches.
@pytest.mark.parametrize("window", [None, 2, 11, TILE + 30])
@pytest.mark.parametrize(("name", "value_width"), [("flash", DIM), ("plain", 5)])
def test_values_and_gradients_equal_the_definition(name: str, value_width: int, window: int | None) -> None:
    lengths = (40, 9, 2 * TILE + 75)
    document_ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    supervised = random_supervised(sum(lengths), document_ids, seed=4)
    reach = window - 1 if window is not None and window % 2 else None
    schedule = schedule_rollout(supervised, document_ids, key_reach=reach)
    for step in range(STEPS):
        compare_with_the_definition(name, value_width, schedule, step, document_ids, window)


def compare_with_the_definition(
    name: str,
    value_width: int,
    schedule: RolloutSchedule,
    step: int,
    document_ids: Tensor,
    window: int | None,
) -> None:
    """Compare the values and gradients of a step's merged attention."""
    tensors = random_tensors(schedule, step, value_width)
    expected = reference(tensors, schedule, step, document_ids, window)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, tensors, grad, materialize_grads=True)
    row_indices = [row_index(schedule, step, earlier) for earlier in range(1, step)] + [None] * (step > 0)
    query, keys, values, *rollout = tensors
    read = LayerKeys(keys, values, tuple(rollout[:step]), tuple(rollout[step:]), tuple(row_indices))
    found = merged_attention(block_of(name, schedule, step, window), query, read.within(window))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found_grads = torch.autograd.grad(found, tensors, grad, materialize_grads=True)
    for one, other in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_tile_reads_no_key_before_its_window() -> None:
    """A long row costs what its windows cost."""
    document_ids = torch.zeros(20 * TILE, dtype=torch.long)
    schedule = schedule_rollout(torch.ones(len(document_ids), 1, dtype=torch.bool), document_ids)
    for window in (1, 50, 5 * TILE):
        mask = tile_mask(len(document_ids), torch.zeros(0), window)
        assert mask.numel() <= TILE * (window + TILE)
        block = TiledBlock(schedule.chunks[0].steps[0].runs, mask, window, FlashKernel(SCALE))
        assert max(keys.stop - keys.start for _, keys, _ in block.tiles) == TILE + window - 1


def random_tensors(schedule: RolloutSchedule, step: int, value_width: int) -> list[Tensor]:
    """Return query, step-0 keys and values, rollout keys of steps 1..step, rollout values."""
    generator = torch.Generator().manual_seed(step)
    heads, num_keys = (4, 2), len(schedule.key_rows)
    rollout = [(len(schedule.chunks[0].steps[i].rows), heads[1]) for i in range(1, step + 1)]
    query, keys = (len(schedule.chunks[0].steps[step].rows), heads[0], DIM), (num_keys, heads[1], DIM)
    values = (num_keys, heads[1], value_width)
    rollout_shapes = [(*x, width) for width in (DIM, value_width) for x in rollout]
    shapes = [query, keys, values, *rollout_shapes]
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
