"""Triton's kernels of the rollout terms compared with the plain ones, which `merged_attention` has."""

import tests.eagle31.kernels.interpreted  # noqa: F401 - before the kernels

# ruff: isort: split
import pytest
import torch

from eagle31.kernels.merged_attention import _merge, _rollout_backward
from eagle31.kernels.packed_attention import PackedBlock
from eagle31.kernels.rollout_terms import add_rows, merge_rollout, rollout_backward, spread_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 2e-2, FP16: 3e-3, FP32: 1e-5}
SCALE = 0.3
NUM_SLOTS, FIRST_ROWS, PLACES = 6, 5, 7
# key heads, queries of each, widths of keys and values, slots that are read, row indices,
# whether keys of step 0 are visible, dtype
CASES = [
    (2, 1, 192, 128, (0, 6), True, True, BF16),
    (1, 4, 128, 128, (2, 4), False, True, FP16),
    (1, 8, 64, 64, (0, 1), True, True, FP32),
    (2, 3, 6, 5, (1, 5), True, False, FP32),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_the_plain_ones(case: tuple) -> None:
    heads, group, width, value_width, steps, indexed, with_block, dtype = case
    torch.manual_seed(width)
    rows = torch.tensor([0, 1, 4]) if indexed else torch.arange(FIRST_ROWS)
    places = torch.tensor([1, 2, 6]) if indexed else rows
    num_places = PLACES if indexed else FIRST_ROWS

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    padded = width + 2  # as the flash kernel's, whose heads are wider
    query, output, grad_query = (random(num_places, heads * group, padded) for _ in range(3))
    lse = torch.randn(heads * group, num_places) if with_block else None
    widths = width, value_width
    own_key, own_value = (random(len(rows), heads, x) for x in widths)
    keys, values = (random(NUM_SLOTS, FIRST_ROWS, heads, x) for x in widths)
    sum_keys, sum_values = (random(NUM_SLOTS, FIRST_ROWS, heads, x) for x in widths)
    grad = random(len(rows), heads * group, value_width)
    indices = (rows, places) if indexed else (None, None)

    first, last = steps[0], steps[1] - 1
    before = slice(first, last)
    wide_keys, wide_values = (
        [*x[before, rows].float(), own.float()] for x, own in ((keys, own_key), (values, own_value))
    )
    at_places = query[places, :, :width].float()
    plain_output = output[places, :, :value_width].float() * with_block
    plain_lse = torch.full((len(rows), heads * group), -torch.inf) if lse is None else lse.t()[places]
    plain_grad = grad_query[places, :, :width].float() * with_block
    expected, expected_lse = _merge(plain_output, plain_lse, at_places, wide_keys, wide_values, SCALE)

    block = PackedBlock((), {}, indices[1], None, indices[0], steps, SCALE, torch.zeros(2))
    attended = None if lse is None else (output, lse.clone())
    merged, merged_lse = merge_rollout(block, attended, query, (own_key, own_value), (keys, values))
    close(merged, expected, dtype)
    close(merged_lse.t()[places], expected_lse, FP32)
    torch.testing.assert_close((keys[last, rows], values[last, rows]), (own_key, own_value))

    of_query, of_rollout = _rollout_backward(
        grad.float(), at_places, wide_keys, wide_values, merged.float(), expected_lse, plain_grad, SCALE
    )
    halves = of_rollout[: len(wide_keys)], of_rollout[len(wide_keys) :]
    of_keys, of_values = map(torch.stack, halves)
    added = (
        sum_keys[first : last + 1, rows].float() + of_keys,
        sum_values[first : last + 1, rows].float() + of_values,
    )
    untouched = sum_keys[:, [2, 3]].clone() if indexed else None
    found = rollout_backward(
        block, grad, query, merged, merged_lse, (keys, values), (sum_keys, sum_values),
        grad_query if with_block else None,
    )  # fmt: skip
    for one, other in zip(found, (of_query, added[0][-1], added[1][-1]), strict=True):
        close(one, other, dtype)
    close(sum_keys[before, rows], added[0][:-1], dtype)
    close(sum_values[before, rows], added[1][:-1], dtype)
    if untouched is not None:
        assert torch.equal(sum_keys[:, [2, 3]], untouched)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    bound = BOUNDS[dtype]
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.float(), expected, rtol=bound, atol=bound * largest)


def test_rows_are_spread_among_zeros_and_padded() -> None:
    x, sources = torch.randn(3, 2, 5), torch.tensor([-1, 0, 1, -1, 2])
    expected = torch.zeros(5, 2, 8)
    expected[[1, 2, 4], :, :5] = x
    first, second = spread_rows([x, 2 * x], sources, 8)
    assert torch.equal(first, expected)
    assert torch.equal(second, 2 * expected)
    assert torch.equal(spread_rows([x], None, 8)[0], expected[[1, 2, 4]])
    assert spread_rows([x], None, 5)[0] is x


def test_rows_are_added() -> None:
    total, x, index = torch.randn(6, 2100), torch.randn(2, 2100), torch.tensor([4, 1])
    expected = total.index_add(0, index, x)
    add_rows(total, index, x)
    torch.testing.assert_close(total, expected)
