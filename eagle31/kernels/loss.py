"""Rows of logits and their gradients on a GPU, in Triton.

A program has one row. It reads the row twice and writes the gradient over it, so that no matrix of the
logits' size is made. The teacher's probabilities are computed from its logits where they are read. Sums
have the same order in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of a row that a program has at once. They are 16 for each thread, so that no two threads have the
# same column, which one would still read when the other has written the gradient over it.
_BLOCK = 4096
_WARPS = 8
_SUM_BLOCK = 1024
_LOWEST = tl.constexpr(-3.0e38)  # finite, so that its difference from -inf is a number


def read_teacher(
    logits: Tensor, draft_target_ids: Tensor | None, with_mass: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return what `differentiate` needs of the target's logits. One launch.

    Args:
        logits: [N, V] of any float dtype up to float32, with contiguous rows.
        draft_target_ids: int64 [Vd], ascending; None where all logits are of the draft vocabulary.
        with_mass: also return the third and fourth.

    Returns:
        Logits over the draft vocabulary [N, Vd]; their log-sum-exp, float32 [N]; the probability of the draft
        vocabulary, float32 [N]; and the draft id of the target's greedy token, int32 [N], -1 outside.
    """
    num_rows, size = logits.shape
    ids, num_kept, kept = draft_target_ids, size, logits
    if ids is not None:
        num_kept = len(ids)
        kept = logits.new_empty(num_rows, num_kept)
    lse = logits.new_empty(num_rows, dtype=torch.float32)
    mass = torch.empty_like(lse) if with_mass else None
    greedy = torch.empty_like(lse, dtype=torch.int32) if with_mass else None
    teacher_kernel[(num_rows,)](
        logits, logits.stride(0), size, ids, kept, num_kept, lse, mass, greedy,
        PRUNED=ids is not None, WITH_MASS=with_mass, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return kept, lse, mass, greedy


def differentiate(
    logits: Tensor,
    teacher: Tensor,
    lse: Tensor,
    draft_mass: Tensor | None,
    greedy: Tensor | None,
    teacher_index: Tensor,
    first: int,
    starts: Tensor,
    longest: int,
    weights: Tensor,
    sums: Tensor,
) -> None:
    """Turn the logits of all steps into the gradients of their weighted losses. Two launches.

    Args:
        logits: [n, Vd] of any float dtype up to float32, contiguous: the rows of step 0, then of step 1, ...
        teacher, lse, draft_mass, greedy: those of `read_teacher`; the last two may be None.
        teacher_index: int64 [n], the index of each row's teacher, plus `first`.
        starts: int64 [K + 1], the first row of each step, and n.
        longest: rows of the step that has most.
        weights: float64 [K], of the steps.
        sums: float64 [5, K]; the rows' number, loss, agreement and expected acceptance are added to the first
            four. The last two of them are zero without `draft_mass` and `greedy`.
    """
    num_rows, size = logits.shape
    num_steps = len(weights)
    found = lse.new_empty(3, num_rows)
    loss_kernel[(longest * num_steps,)](
        logits, size, teacher, teacher.stride(0), lse, draft_mass, greedy, teacher_index, first,
        starts, weights, found, num_rows,
        WITH_MASS=draft_mass is not None, STEPS=num_steps, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    sum_kernel[(num_steps,)](found, num_rows, starts, sums, STEPS=num_steps, BLOCK=_SUM_BLOCK)


@triton.jit
def _absorb(top, total, x):
    """Return the maximum of top and x, and the sum of exponentials relative to it, with one exponential."""
    decay = tl.exp(-tl.abs(x - top))
    return tl.maximum(top, x), tl.where(x > top, total * decay + 1.0, total + decay)


@triton.jit
def _log_sum_exp(top, total):
    most = tl.max(top, 0)
    return most + tl.log(tl.sum(total * tl.exp(top - most), 0))


@triton.jit
def _read_row(row, size, BLOCK: tl.constexpr):
    """Return the row's log-sum-exp and the first column of its maximum. Reads the row once."""
    top = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    column_of_top = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, size, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = tl.load(row + columns, mask=columns < size, other=float("-inf"), eviction_policy="evict_last").to(
            tl.float32
        )
        column_of_top = tl.where(x > top, columns, column_of_top)
        top, total = _absorb(top, total, x)
    greedy = tl.min(tl.where(top == tl.max(top, 0), column_of_top, size), 0)
    return _log_sum_exp(top, total), greedy


@triton.jit
def teacher_kernel(
    logits, stride, size, ids, kept, num_kept, lse, mass, greedy,
    PRUNED: tl.constexpr, WITH_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads [N, V] of `logits` once. If PRUNED, reads [N, Vd] of `ids` and `logits`, and writes `kept`."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    log_total, best = _read_row(row, size, BLOCK)
    log_kept = log_total
    if PRUNED:
        top = tl.full([BLOCK], _LOWEST, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        draft_id = tl.full([BLOCK], -1, tl.int32)
        for begin in range(0, num_kept, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            token = tl.load(ids + columns, mask=columns < num_kept, other=-1)
            x = tl.load(row + token, mask=columns < num_kept, other=float("-inf"))
            tl.store(kept + index * num_kept + columns, x, mask=columns < num_kept)
            draft_id = tl.where(token == best, columns, draft_id)
            top, total = _absorb(top, total, x.to(tl.float32))
        best = tl.max(draft_id, 0)
        log_kept = _log_sum_exp(top, total)
    tl.store(lse + index, log_kept)
    if WITH_MASS:
        tl.store(mass + index, tl.exp(log_kept - log_total))
        tl.store(greedy + index, best)


@triton.jit(do_not_specialize=["first", "num_rows"])
def loss_kernel(
    logits, size, teacher, teacher_stride, lse, draft_mass, greedy, teacher_index, first,
    starts, weights, found, num_rows,
    WITH_MASS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads [n, Vd] of `logits` twice and of `teacher` once; writes [n, Vd] of `logits` once.

    With factors of two bytes that makes 8 bytes per logit.
    """
    # Programs that follow each other have the same teacher in most cases, which the cache then holds.
    step = tl.program_id(0) % STEPS
    index = tl.load(starts + step) + tl.program_id(0) // STEPS
    if index >= tl.load(starts + step + 1):
        return
    row = logits + index * size
    weight = tl.load(weights + step).to(tl.float32)
    position = tl.load(teacher_index + index) - first
    teacher += position * teacher_stride
    teacher_lse = tl.load(lse + position)
    log_total, best = _read_row(row, size, BLOCK)
    if WITH_MASS:
        mass = tl.load(draft_mass + position)
        tl.store(found + num_rows + index, (best == tl.load(greedy + position)).to(tl.float32))
    else:
        tl.store(found + num_rows + index, 0.0)

    cross = tl.zeros([BLOCK], tl.float32)
    accepted = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, size, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        log_q = tl.load(row + columns, mask=columns < size, other=0.0).to(tl.float32) - log_total
        y = tl.load(teacher + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        q, p = tl.exp(log_q), tl.exp(y - teacher_lse)  # p is zero after the last column
        # The store comes first: after the sum, the kernel for float32 spills a register.
        tl.store(row + columns, (weight * (q - p)).to(row.dtype.element_ty), mask=columns < size)
        cross -= p * log_q
        if WITH_MASS:
            accepted += tl.minimum(q, p * mass)
    tl.store(found + index, tl.sum(cross, 0))
    tl.store(found + 2 * num_rows + index, tl.sum(accepted, 0))


@triton.jit(do_not_specialize=["num_rows"])
def sum_kernel(found, num_rows, starts, sums, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Reads `found` [3, n] once, and adds the sums of each step's rows to `sums`."""
    step = tl.program_id(0)
    start, stop = tl.load(starts + step), tl.load(starts + step + 1)
    tl.store(sums + step, tl.load(sums + step) + (stop - start).to(tl.float64))
    for column in tl.static_range(3):
        total = tl.zeros([BLOCK], tl.float64)
        for begin in range(start, stop, BLOCK):
            rows = begin + tl.arange(0, BLOCK)
            values = tl.load(found + column * num_rows + rows, mask=rows < stop, other=0.0)
            total += values.to(tl.float64)
        target = sums + (column + 1) * STEPS + step
        tl.store(target, tl.load(target) + tl.sum(total, 0))
