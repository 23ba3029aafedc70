"""The loss over all rows and steps in one pass over the teacher's positions.

No step needs another step's logits, so the rollout runs first. The loss then takes the teacher's positions j
in chunks, together with all pairs (t = j-1-k, k) that predict them. The teacher's distribution is computed
once per position, the pairs' logits in one matrix product, and the gradients in the same pass. Then the
logits are dropped, so the peak memory is that of one chunk.

The elementwise part of a chunk runs in blocks of one step's rows: all of them on a GPU, and on the CPU as
many as fit its caches.

Source: Liger-Kernel's fused linear cross entropy computes its gradient in the forward pass in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle31.kernels.elementwise import widened
from eagle31.training.objectives import Loss, Teacher, loss_with_gradient
from eagle31.training.schedule import ChunkSchedule

# Logits of a block on the CPU: few enough for its caches, and enough that waking other threads costs little
# of each operation.
BLOCK_LOGITS = 2**19
# Elements of the head's gradient that are computed at once where they are narrower than their sum.
PRODUCT_ELEMENTS = 2**25


@dataclass(frozen=True)
class _Loss:
    """What the loss depends on, apart from the draft head and the states."""

    teacher: Callable[[slice], Teacher]
    schedule: ChunkSchedule
    objective: Loss
    step_weights: tuple[float, ...]
    chunk_size: int  # teacher positions


@dataclass(frozen=True)
class _Chunk:
    """The teacher positions `first`, `first + 1`, ..., and for each step the rows that predict them."""

    first: int
    rows: list[slice]


class _OnePass(torch.autograd.Function):
    """The tensor inputs are the head's weight [Vd, H] and the states [R_k, H] of each step."""

    @staticmethod
    def forward(ctx: Any, loss: _Loss, weight: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        ctx.needed = ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:])
        total, sums, grad_weight, grad_states = _run(loss, weight, states, *ctx.needed)
        ctx.weight_dtype = weight.dtype
        # They are neither inputs nor outputs. Kept here, backward can scale them in place and release them.
        ctx.grads = grad_weight, grad_states
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.grads is not None, "the loss can be differentiated only once"
        (grad_weight, grad_states), ctx.grads = ctx.grads, None
        scaled = grad_weight.mul_(grad).to(ctx.weight_dtype) if ctx.needed[0] else None
        if not ctx.needed[1]:
            return None, scaled, *(None for _ in ctx.needs_input_grad[2:])
        return None, scaled, *(x.mul_(grad) for x in grad_states)


def one_pass_loss(
    states: Sequence[Tensor],
    weight: Tensor,
    teacher: Callable[[slice], Teacher],
    schedule: ChunkSchedule,
    objective: Loss,
    step_weights: Sequence[float],
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the sum over steps of the weighted losses of the step's rows.

    Args:
        states: the head's input, [R_k, H] for each step's rows.
        weight: [Vd, H], the draft head.
        teacher: returns the target's distributions at some of the schedule's teacher rows.
        step_weights: of each step's losses.
        chunk_rows: rows of logits held at once, over all steps.

    Returns:
        The scalar loss, float32 or wider, and float64 [5, K]: supervised rows, loss, rows whose greedy draft
        is the target's greedy token, sum of min(p, q), and the weighted loss. The third and fourth are zero
        where the teacher has no greedy token or no draft mass.
    """
    chunk_size = max(1, chunk_rows // len(step_weights))
    return _OnePass.apply(
        _Loss(teacher, schedule, objective, tuple(step_weights), chunk_size), weight, *states
    )


def _run(
    loss: _Loss, weight: Tensor, states: Sequence[Tensor], for_weight: bool, for_states: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the loss, the sums, and the requested gradients of weight and states."""
    wide = widened(weight.dtype)
    sums = torch.zeros(5, len(states), dtype=torch.float64, device=weight.device)
    grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else weight.new_empty(0)
    grad_states = [torch.empty_like(x) for x in states] if for_states else []
    # All chunks share one buffer: the page faults of a new one cost as much as the softmax.
    num_positions = min(loss.chunk_size, len(loss.schedule.teacher_rows))
    buffer = weight.new_empty(num_positions * len(states), weight.shape[0])
    for chunk in _chunks(loss.schedule, loss.chunk_size):
        rows = torch.cat([x[piece] for x, piece in zip(states, chunk.rows, strict=True)])
        logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])
        _differentiate(loss, logits, chunk, sums)
        parts = rows.split([piece.stop - piece.start for piece in chunk.rows])
        if for_weight:
            for part, scale in zip(parts, loss.step_weights, strict=True):
                part.mul_(scale)
            _add_product(grad_weight, logits.t(), rows)
        if for_states:
            torch.mm(logits, weight, out=rows)
            for grad, piece, part, scale in zip(
                grad_states, chunk.rows, parts, loss.step_weights, strict=True
            ):
                torch.mul(part, scale, out=grad[piece])
    sums[4] = torch.stack([scale * one for scale, one in zip(loss.step_weights, sums[1], strict=True)])
    total = sum(sums[4])
    assert isinstance(total, Tensor)
    return total.to(wide), sums, grad_weight, grad_states


def _chunks(schedule: ChunkSchedule, chunk_size: int) -> Iterator[_Chunk]:
    num_positions = len(schedule.teacher_rows)
    edges = torch.arange(0, num_positions + chunk_size, chunk_size)
    bounds = [torch.searchsorted(step.teacher_index_host, edges).tolist() for step in schedule.steps]
    for number, first in enumerate(range(0, num_positions, chunk_size)):
        yield _Chunk(first, [slice(of_step[number], of_step[number + 1]) for of_step in bounds])


def _differentiate(loss: _Loss, logits: Tensor, chunk: _Chunk, sums: Tensor) -> None:
    """Turn the logits of a chunk into their gradients, without the steps' weights, and add to the sums."""
    num_positions = min(loss.chunk_size, len(loss.schedule.teacher_rows) - chunk.first)
    teacher = loss.teacher(slice(chunk.first, chunk.first + num_positions))
    entropy = teacher.entropy() if loss.objective.needs_full_vocabulary else None
    on_gpu = logits.device.type == "cuda"
    block_rows = num_positions if on_gpu else max(1, BLOCK_LOGITS // logits.shape[1])
    scratch = logits.new_empty(min(block_rows, len(logits)), logits.shape[1], dtype=teacher.probs.dtype)
    of_steps = logits.split([piece.stop - piece.start for piece in chunk.rows])
    for step, (piece, of_step) in enumerate(zip(chunk.rows, of_steps, strict=True)):
        # Where a step has a row for every position of the chunk, slices save copies of the teacher.
        index = None
        if len(of_step) < num_positions:
            index = loss.schedule.steps[step].teacher_index[piece] - chunk.first
        for start in range(0, len(of_step), block_rows):
            stop = min(start + block_rows, len(of_step))
            positions = slice(start, stop) if index is None else index[start:stop]
            _block(
                loss.objective,
                of_step[start:stop],
                teacher.select(positions),
                None if entropy is None else entropy[positions],
                scratch[: stop - start],
                sums[:, step],
            )


def _block(
    objective: Loss,
    logits: Tensor,
    teacher: Teacher,
    entropy: Tensor | None,
    scratch: Tensor,
    sums: Tensor,
) -> None:
    """Turn logits [n, Vd] into their gradients, and add to the step's sums [5]."""
    wide = logits.to(teacher.probs.dtype)
    hits = None if teacher.greedy is None else logits.argmax(-1) == teacher.greedy
    loss, alpha = loss_with_gradient(objective, wide, teacher, entropy, scratch)
    columns = [torch.ones_like(loss), loss, hits, alpha]
    if wide is not logits:
        logits.copy_(wide)
    for i, column in enumerate(columns):
        if column is not None:
            sums[i] += column.sum()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, which is float32 where the factors are narrower.

    Then the product has the factors' dtype before it is added. It is computed for some of its rows at a time,
    because all of it would be half as large as `total`.
    """
    if total.dtype == right.dtype:
        total.addmm_(left, right)
        return
    num_rows = max(1, PRODUCT_ELEMENTS // total.shape[1])
    for part, factor in zip(total.split(num_rows), left.split(num_rows), strict=True):
        part += factor @ right
