"""The loss over all rows and steps in one pass over the teacher's positions.

No step needs another step's logits, so the rollout runs first. The loss then takes the teacher's positions j
in parts, together with all pairs (t = j-1-k, k) that predict them. The teacher's distribution is computed
once per position, the pairs' logits in one matrix product, and the gradients in the same pass. Then the
logits are dropped, so the peak memory is that of one part.

On a GPU what is elementwise in a part is one kernel, with the weights of the steps. On the CPU it runs in
blocks of one step's rows, as many as fit the caches.

Logits have the weight's dtype, as vLLM's have when it drafts; what is computed from them is float32 or
wider. In bfloat16 their rounding errors differ from row to row, and so average out: a head that was trained
on them until 95 % of its greedy drafts were right, with logits near 21, has an expected acceptance of 0.9551,
and one that was trained on float32 logits 0.9553.

Source: Liger-Kernel's fused linear cross entropy computes its gradient in the forward pass in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle31.kernels.elementwise import widened
from eagle31.kernels.transfer import to_device
from eagle31.training.schedule import ChunkSchedule
from eagle31.training.teacher import Teacher, TeacherLogits

# Logits of a block on the CPU: few enough for its caches, and enough that waking other threads costs little
# of each operation.
BLOCK_LOGITS = 2**19
# Elements of the head's gradient that the CPU computes at once where they are narrower than their sum.
PRODUCT_ELEMENTS = 2**25


@dataclass(frozen=True)
class _Loss:
    """What the loss depends on, apart from the draft head and the states."""

    teacher: Callable[[slice], Teacher | TeacherLogits]
    schedule: ChunkSchedule
    step_weights: tuple[float, ...]
    part_size: int  # teacher positions


@dataclass(frozen=True)
class _Part:
    """The teacher positions `first`, `first + 1`, ..., and for each step the rows that predict them."""

    first: int
    num_positions: int
    rows: list[slice]
    starts: Tensor  # int64 [K + 1], on the device: where each step's rows start in the part, and its size


class _OnePass(torch.autograd.Function):
    """The tensor inputs are the head's weight [Vd, H] and the states [R_k, H] of each step."""

    @staticmethod
    def forward(ctx: Any, loss: _Loss, weight: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        ctx.for_weight, ctx.weight_dtype = ctx.needs_input_grad[1], weight.dtype
        total, sums, grad_weight, grad_states = _run(loss, weight, states, ctx.for_weight)
        # They are neither inputs nor outputs. Kept here, backward can scale them in place and release them.
        ctx.grads = grad_weight, grad_states
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.grads is not None, "the loss can be differentiated only once"
        (grad_weight, grad_states), ctx.grads = ctx.grads, None
        scaled = grad_weight.mul_(grad).to(ctx.weight_dtype) if ctx.for_weight else None
        return None, scaled, *(x.mul_(grad) for x in grad_states)


def one_pass_loss(
    states: Sequence[Tensor],
    weight: Tensor,
    teacher: Callable[[slice], Teacher | TeacherLogits],
    schedule: ChunkSchedule,
    step_weights: Sequence[float],
    logit_rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the sum over steps of the weighted losses of the step's rows.

    Args:
        states: the head's input, [R_k, H] for each step's rows.
        weight: [Vd, H], the draft head.
        teacher: returns the target's distributions at some of the schedule's teacher rows.
        step_weights: of each step's losses.
        logit_rows: rows of logits held at once, over all steps.

    Returns:
        The scalar loss, float32 or wider, and float64 [5, K]: supervised rows, loss, rows whose greedy draft
        is the target's greedy token, sum of min(p, q), and the weighted loss. The third and fourth are zero
        where the teacher has no greedy token or no draft mass.
    """
    part_size = max(1, logit_rows // len(step_weights))
    return _OnePass.apply(_Loss(teacher, schedule, tuple(step_weights), part_size), weight, *states)


def _run(
    loss: _Loss, weight: Tensor, states: Sequence[Tensor], for_weight: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the loss, the sums, and the gradients of the weight, if it is trained, and of the states."""
    wide = widened(weight.dtype)
    sums = torch.zeros(5, len(states), dtype=torch.float64, device=weight.device)
    grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else weight.new_empty(0)
    grad_states = [torch.empty_like(x) for x in states]
    weights = to_device([torch.tensor(loss.step_weights, dtype=torch.float64)], weight.device)[0]
    # All parts share one buffer: the page faults of a new one cost as much as the softmax.
    num_positions = min(loss.part_size, len(loss.schedule.teacher_rows))
    buffer = weight.new_empty(num_positions * len(states), weight.shape[0])
    for part in _parts(loss.schedule, loss.part_size, weight.device):
        rows = torch.cat([x[piece] for x, piece in zip(states, part.rows, strict=True)])
        of_steps = rows.split([piece.stop - piece.start for piece in part.rows])
        logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])
        weighted = _differentiate(loss, logits, part, weights, sums)
        if for_weight:
            if not weighted:
                torch._foreach_mul_(of_steps, loss.step_weights)
            _add_product(grad_weight, logits.t(), rows)
        torch.mm(logits, weight, out=rows)
        if not weighted:
            torch._foreach_mul_(of_steps, loss.step_weights)
        into = [grad[piece] for grad, piece in zip(grad_states, part.rows, strict=True)]
        torch._foreach_copy_(into, of_steps)
    torch.mul(weights, sums[1], out=sums[4])
    return sums[4].sum().to(wide), sums, grad_weight, grad_states


def _parts(schedule: ChunkSchedule, part_size: int, device: torch.device) -> Iterator[_Part]:
    num_positions = len(schedule.teacher_rows)
    edges = torch.arange(0, num_positions + part_size, part_size)
    bounds = torch.stack([torch.searchsorted(step.teacher_index_host, edges) for step in schedule.steps])
    starts = F.pad(bounds.diff(dim=1).cumsum(0), (0, 0, 1, 0)).t().contiguous()
    of_steps = bounds.tolist()
    for number, of_part in enumerate(to_device(list(starts), device)):
        first = number * part_size
        rows = [slice(of_step[number], of_step[number + 1]) for of_step in of_steps]
        yield _Part(first, min(part_size, num_positions - first), rows, of_part)


def _differentiate(loss: _Loss, logits: Tensor, part: _Part, weights: Tensor, sums: Tensor) -> bool:
    """Turn the logits of a part into their gradients, and add to the sums.

    Returns:
        Whether the gradients have the steps' weights.
    """
    teacher = loss.teacher(slice(part.first, part.first + part.num_positions))
    if isinstance(teacher, Teacher):
        _differentiate_in_blocks(loss, logits, teacher, part, sums)
        return False
    from eagle31.kernels.loss import differentiate

    steps = zip(loss.schedule.steps, part.rows, strict=True)
    differentiate(
        logits,
        *teacher,
        teacher_index=torch.cat([step.teacher_index[piece] for step, piece in steps]),
        first=part.first,
        starts=part.starts,
        longest=max(piece.stop - piece.start for piece in part.rows),
        weights=weights,
        sums=sums,
    )
    return True


def _differentiate_in_blocks(
    loss: _Loss, logits: Tensor, teacher: Teacher, part: _Part, sums: Tensor
) -> None:
    block_rows = max(1, BLOCK_LOGITS // logits.shape[1])
    scratch = logits.new_empty(min(block_rows, len(logits)), logits.shape[1], dtype=teacher.probs.dtype)
    of_steps = logits.split([piece.stop - piece.start for piece in part.rows])
    for step, (piece, of_step) in enumerate(zip(part.rows, of_steps, strict=True)):
        # Where a step has a row for every position of the part, slices save copies of the teacher.
        index = None
        if len(of_step) < part.num_positions:
            index = loss.schedule.steps[step].teacher_index[piece] - part.first
        for start in range(0, len(of_step), block_rows):
            stop = min(start + block_rows, len(of_step))
            block = of_step[start:stop]
            of_block = teacher.select(slice(start, stop) if index is None else index[start:stop])
            hits = None if of_block.greedy is None else block.argmax(-1) == of_block.greedy
            wide = block.to(scratch.dtype)
            cross, alpha = loss_with_gradient(wide, of_block, scratch[: stop - start])
            if wide is not block:
                block.copy_(wide)
            for i, column in enumerate((torch.ones_like(cross), cross, hits, alpha)):
                if column is not None:
                    sums[i, step] += column.sum()


def loss_with_gradient(logits: Tensor, teacher: Teacher, scratch: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute `plain_loss` of `eagle31.training.reference` and its gradient with few passes over [N, Vd].

    Args:
        logits: float32 or wider [N, Vd]; becomes d loss / d logits.
        scratch: [N, Vd] like `logits`; overwritten.

    Returns:
        The loss [N], and `plain_alpha` [N] where the teacher has its `draft_mass`.
    """
    cross = torch.linalg.vecdot(teacher.probs, logits)
    top = logits.amax(-1)
    q = torch.softmax(logits, dim=-1, out=scratch)
    # The largest probability is exp(0) / sum, from which the log-sum-exp follows.
    cross = top - q.amax(-1).log_() - cross
    alpha = None
    if teacher.draft_mass is not None:
        target = torch.mul(teacher.probs, teacher.draft_mass.unsqueeze(-1), out=logits)
        alpha = torch.minimum(q, target, out=target).sum(-1)
    torch.sub(q, teacher.probs, out=logits)
    return cross, alpha


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, which is float32 where the factors are narrower.

    Then the CPU rounds the product to the factors' dtype before it is added. It computes some of its rows at
    a time, because all of it would be half as large as `total`.
    """
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda":
        _add_wide_product(total, left, right)
    else:
        num_rows = max(1, PRODUCT_ELEMENTS // total.shape[1])
        for part, factor in zip(total.split(num_rows), left.split(num_rows), strict=True):
            part += factor @ right


def _add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total` without rounding it to the factors' dtype."""
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
