"""The loss over all rows and steps in one pass over the teacher's positions.

No step needs another step's logits, so the rollout runs first. The loss then takes the teacher's positions j
in chunks, together with all pairs (t = j-1-k, k) that predict them. The teacher's distribution is computed
once per position, the pairs' logits in one matrix product, and the gradients in the same pass. Then the
logits are dropped, so the peak memory is that of one chunk.

Source: Liger-Kernel's fused linear cross entropy computes its gradient in the forward pass in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle31.kernels.elementwise import widened
from eagle31.training.objectives import Loss, Objective, Teacher, loss_with_gradient
from eagle31.training.schedule import RolloutSchedule

# Rows of logits that the elementwise part handles at once on the CPU, so that they stay in its caches.
BLOCK_ROWS = 32
# Elements of the head's gradient that are computed at once where they are narrower than their sum.
PRODUCT_ELEMENTS = 2**25


class _OnePass(torch.autograd.Function):
    """The tensor inputs are the head's weight [Vd, H] and the states [R_k, H] of each step."""

    @staticmethod
    def forward(ctx: Any, loss: "_ChunkedLoss", weight: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        ctx.needed = ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:])
        total, sums, grad_weight, grad_states = loss.run(weight, states, *ctx.needed)
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
    teacher: Callable[[Tensor], Teacher],
    schedule: RolloutSchedule,
    objective: Objective,
    step_weights: Sequence[float],
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the sum over steps of step_weights[k] times the losses of the step's rows.

    Args:
        states: the head's input, [R_k, H] for each step's rows.
        weight: [Vd, H], the draft head.
        teacher: returns the target's distributions at rows int64 [n].
        chunk_rows: rows of logits held at once, over all steps.

    Returns:
        The scalar loss, float32 or wider, and float64 [4, K]: supervised rows, loss, rows whose greedy draft
        is the target's greedy token, and sum of min(p, q). The last two are zero where the teacher has no
        greedy token or no draft mass.
    """
    loss = _ChunkedLoss(teacher, schedule, objective, tuple(step_weights), chunk_rows)
    return _OnePass.apply(loss, weight, *states)


class _ChunkedLoss:
    """The loss and its gradients, chunk by chunk."""

    def __init__(
        self,
        teacher: Callable[[Tensor], Teacher],
        schedule: RolloutSchedule,
        objective: Objective,
        step_weights: tuple[float, ...],
        chunk_rows: int,
    ) -> None:
        self.teacher, self.schedule, self.objective, self.step_weights = (
            teacher,
            schedule,
            objective,
            step_weights,
        )
        self.chunk_size = max(1, chunk_rows // len(step_weights))  # teacher positions

    def run(
        self, weight: Tensor, states: Sequence[Tensor], for_weight: bool, for_states: bool
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the loss, the sums, and the requested gradients of weight and states."""
        wide = widened(weight.dtype)
        sums = torch.zeros(4, len(states), dtype=torch.float64, device=weight.device)
        grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else weight.new_empty(0)
        grad_states = [torch.empty_like(x) for x in states] if for_states else []
        # All chunks share one buffer: the page faults of a new one cost as much as the softmax.
        num_positions = min(self.chunk_size, len(self.schedule.teacher_rows))
        buffer = weight.new_empty(num_positions * len(states), weight.shape[0])
        for first, pieces in self._chunks():
            rows = torch.cat([x[piece] for x, piece in zip(states, pieces, strict=True)])
            logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])
            teacher = self.teacher(self.schedule.teacher_rows[first : first + self.chunk_size])
            self._differentiate(logits, teacher, first, pieces, sums)
            parts = rows.split([piece.stop - piece.start for piece in pieces])
            if for_weight:
                for part, scale in zip(parts, self.step_weights, strict=True):
                    part.mul_(scale)
                _add_product(grad_weight, logits.t(), rows)
            if for_states:
                torch.mm(logits, weight, out=rows)
                for grad, piece, part, scale in zip(
                    grad_states, pieces, parts, self.step_weights, strict=True
                ):
                    torch.mul(part, scale, out=grad[piece])
        total = sum(scale * loss for scale, loss in zip(self.step_weights, sums[1], strict=True))
        assert isinstance(total, Tensor)
        return total.to(wide), sums, grad_weight, grad_states

    def _chunks(self) -> Iterator[tuple[int, list[slice]]]:
        """Yield each chunk's first teacher position, and the rows of each step that predict the chunk."""
        num_positions = len(self.schedule.teacher_rows)
        edges = torch.arange(0, num_positions + self.chunk_size, self.chunk_size)
        bounds = [torch.searchsorted(step.teacher_index_host, edges).tolist() for step in self.schedule.steps]
        for chunk, first in enumerate(range(0, num_positions, self.chunk_size)):
            yield first, [slice(b[chunk], b[chunk + 1]) for b in bounds]

    def _differentiate(
        self, logits: Tensor, teacher: Teacher, first: int, pieces: Sequence[slice], sums: Tensor
    ) -> None:
        """Turn the logits of a chunk into their gradients, and add to the sums."""
        num_positions = len(teacher.probs)
        needs_entropy = self.objective.loss in (Loss.full_kl, Loss.lk_lambda)
        entropy = teacher.entropy() if needs_entropy else None
        # A block has rows of one step, so it has at most one row for each position.
        block_rows = num_positions if logits.device.type == "cuda" else BLOCK_ROWS
        scratch = logits.new_empty(min(block_rows, len(logits)), logits.shape[1], dtype=teacher.probs.dtype)
        done = 0
        for step, piece in enumerate(pieces):
            # Where every position of the chunk has a row at this step, the indices are 0, 1, 2, ...
            is_complete = piece.stop - piece.start == num_positions
            position_index = self.schedule.steps[step].teacher_index[piece] - first
            for start in range(0, piece.stop - piece.start, block_rows):
                rows = slice(start, min(start + block_rows, piece.stop - piece.start))
                index = rows if is_complete else position_index[rows]
                block = logits[done + rows.start : done + rows.stop]
                self._block(
                    block,
                    teacher.select(index),
                    None if entropy is None else entropy[index],
                    scratch[: len(block)],
                    sums[:, step],
                )
            done += piece.stop - piece.start

    def _block(
        self, logits: Tensor, teacher: Teacher, entropy: Tensor | None, scratch: Tensor, sums: Tensor
    ) -> None:
        wide = logits.to(teacher.probs.dtype)
        hits = None if teacher.greedy is None else logits.argmax(-1) == teacher.greedy
        loss, alpha = loss_with_gradient(self.objective, wide, teacher, entropy, scratch)
        columns = [torch.ones_like(loss), loss, hits, alpha]
        if not self.objective.count_outside_vocab:
            assert teacher.greedy is not None
            inside = teacher.greedy >= 0
            wide.mul_(inside.unsqueeze(-1))
            columns = [None if x is None else x * inside for x in columns]
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
