"""The loss over all rows and steps in one pass over the teacher's positions.

No step needs another step's logits, so the rollout runs first. The loss then takes the teacher's positions j
in chunks, together with all pairs (t = j-1-k, k) that predict them. The teacher's distribution is computed
once per position, the pairs' logits in one matrix product, and the gradients in the same pass. Then the
logits are dropped, so the peak memory is that of one chunk.

An objective of whole chains (`eagle31.training.acceptance_chain`) takes the rows t in chunks instead, each
with all its steps. Such a chunk reads K - 1 teachers of the next one too.

Source: Liger-Kernel's fused linear cross entropy computes its gradient in the forward pass in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle31.kernels.elementwise import widened
from eagle31.training.acceptance_chain import DraftChain, reach_of, remaining_of, smoothed
from eagle31.training.objectives import (
    Loss,
    Objective,
    StepWeights,
    Teacher,
    acceptance_rates,
    loss_with_gradient,
)
from eagle31.training.schedule import RolloutSchedule

# Logits that the elementwise part handles at once on the CPU: few enough for its caches, and enough that
# waking other threads costs little of each operation.
BLOCK_LOGITS = 2**19
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
    """Return the sum over steps of the weighted losses of the step's rows.

    Args:
        states: the head's input, [R_k, H] for each step's rows.
        weight: [Vd, H], the draft head.
        teacher: returns the target's distributions at rows int64 [n].
        step_weights: of each step's losses; `StepWeights.reach` replaces them.
        chunk_rows: rows of logits held at once, over all steps.

    Returns:
        The scalar loss, float32 or wider, and float64 [5, K]: supervised rows, loss, rows whose greedy draft
        is the target's greedy token, sum of min(p, q), and the weighted loss. The third and fourth are zero
        where the teacher has no greedy token or no draft mass.
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
        self.chunk_size = max(1, chunk_rows // len(step_weights))  # teacher positions, or chains
        # The teacher of a chain at step k is k positions later than at step 0.
        self.shift = 1 if objective.needs_chain else 0

    def run(
        self, weight: Tensor, states: Sequence[Tensor], for_weight: bool, for_states: bool
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the loss, the sums, and the requested gradients of weight and states."""
        wide = widened(weight.dtype)
        sums = torch.zeros(5, len(states), dtype=torch.float64, device=weight.device)
        grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else weight.new_empty(0)
        grad_states = [torch.empty_like(x) for x in states] if for_states else []
        # All chunks share one buffer: the page faults of a new one cost as much as the softmax.
        num_positions = min(self.chunk_size, len(self.schedule.teacher_rows))
        buffer = weight.new_empty(num_positions * len(states), weight.shape[0])
        later = self.shift * (len(states) - 1)
        for first, pieces in self._chunks():
            rows = torch.cat([x[piece] for x, piece in zip(states, pieces, strict=True)])
            logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])
            teacher = self.teacher(self.schedule.teacher_rows[first : first + self.chunk_size + later])
            scales = self._differentiate(logits, teacher, first, pieces, sums)
            parts = rows.split([piece.stop - piece.start for piece in pieces])
            if for_weight:
                for part, scale in zip(parts, scales, strict=True):
                    part.mul_(scale)
                _add_product(grad_weight, logits.t(), rows)
            if for_states:
                torch.mm(logits, weight, out=rows)
                for grad, piece, part, scale in zip(grad_states, pieces, parts, scales, strict=True):
                    torch.mul(part, scale, out=grad[piece])
        if not self.objective.needs_chain:
            sums[4] = torch.stack(
                [scale * loss for scale, loss in zip(self.step_weights, sums[1], strict=True)]
            )
        total = sum(sums[4])
        assert isinstance(total, Tensor)
        return total.to(wide), sums, grad_weight, grad_states

    def _chunks(self) -> Iterator[tuple[int, list[slice]]]:
        """Yield each chunk's first teacher position, and its rows of each step.

        The supervised row t has its teacher at t + 1, so chains and teachers have the same indices at step 0.
        """
        num_positions = len(self.schedule.teacher_rows)
        edges = torch.arange(0, num_positions + self.chunk_size, self.chunk_size)
        bounds = [
            torch.searchsorted(step.teacher_index_host, edges + self.shift * k).tolist()
            for k, step in enumerate(self.schedule.steps)
        ]
        for chunk, first in enumerate(range(0, num_positions, self.chunk_size)):
            yield first, [slice(b[chunk], b[chunk + 1]) for b in bounds]

    def _differentiate(
        self, logits: Tensor, teacher: Teacher, first: int, pieces: Sequence[slice], sums: Tensor
    ) -> Sequence[Tensor | float]:
        """Turn the logits of a chunk into their gradients, and add to the sums.

        Returns:
            The factors that the gradients of each step still lack.
        """
        num_chains = min(self.chunk_size, len(self.schedule.teacher_rows) - first)
        entropy = teacher.entropy() if self.objective.needs_entropy else None
        on_gpu = logits.device.type == "cuda"
        block_rows = num_chains if on_gpu else max(1, BLOCK_LOGITS // logits.shape[1])
        scratch = logits.new_empty(min(block_rows, len(logits)), logits.shape[1], dtype=teacher.probs.dtype)
        blocks = list(self._blocks(first, num_chains, pieces, block_rows))
        by_chain = scratch.new_zeros(2, len(pieces), num_chains) if self.objective.needs_chain else None
        chain: DraftChain | None = None
        if self.objective.loss is Loss.acceptance_length:
            assert by_chain is not None
            for one in blocks:
                narrow = logits[one.rows]
                wide = narrow.to(teacher.probs.dtype)
                by_chain[0, one.step, one.chains] = acceptance_rates(
                    wide,
                    teacher.select(one.positions),
                    scratch[: len(wide)],
                    overwrite=wide is not narrow,
                )
            chain = self._chain(by_chain[0])
        for one in blocks:
            loss, alpha = self._block(
                logits[one.rows],
                teacher.select(one.positions),
                None if entropy is None else entropy[one.positions],
                scratch[: one.rows.stop - one.rows.start],
                None if chain is None else chain.select(one.step, one.chains),
                sums[:, one.step],
            )
            if by_chain is not None:
                assert alpha is not None
                by_chain[0, one.step, one.chains], by_chain[1, one.step, one.chains] = alpha, loss
        if by_chain is None:
            return self.step_weights
        alphas, losses = by_chain
        if chain is not None:
            sums[4] += losses.sum(-1)
            return [1.0] * len(pieces)
        weights = self._chain_weights(alphas)
        sums[4] += (weights * losses).sum(-1)
        return [
            weights[step, self._chains(step, piece, first, num_chains)].unsqueeze(-1)
            for step, piece in enumerate(pieces)
        ]

    def _chain(self, alphas: Tensor) -> DraftChain:
        """Return what the gradient of each draft needs of its chain. [K, n]."""
        return DraftChain(self._chain_weights(alphas), reach_of(alphas), remaining_of(alphas))

    def _chain_weights(self, alphas: Tensor) -> Tensor:
        """Return the weight of each draft. [K, n] -> [K, n]."""
        if self.objective.step_weights is StepWeights.reach:
            return reach_of(smoothed(alphas, self.objective.reach_smoothing))
        return torch.stack([torch.full_like(alphas[0], weight) for weight in self.step_weights])

    def _positions(self, step: int, piece: slice, first: int, num_chains: int) -> slice | Tensor:
        """Return the teachers of a step's rows, as indices into the chunk."""
        # Where every chain of the chunk has a row at this step, the indices are 0, 1, 2, ...
        if piece.stop - piece.start == num_chains:
            return slice(self.shift * step, self.shift * step + num_chains)
        return self.schedule.steps[step].teacher_index[piece] - first

    def _chains(self, step: int, piece: slice, first: int, num_chains: int) -> slice | Tensor:
        """Return the chains of a step's rows, as indices into the chunk."""
        return _moved(self._positions(step, piece, first, num_chains), -self.shift * step)

    def _blocks(
        self, first: int, num_chains: int, pieces: Sequence[slice], block_rows: int
    ) -> Iterator["_Block"]:
        """Yield the rows that the elementwise part handles at once: at most `block_rows` of one step."""
        done = 0
        for step, piece in enumerate(pieces):
            num_rows = piece.stop - piece.start
            all_positions = self._positions(step, piece, first, num_chains)
            for start in range(0, num_rows, block_rows):
                stop = min(start + block_rows, num_rows)
                if isinstance(all_positions, slice):
                    positions: slice | Tensor = _moved(slice(start, stop), all_positions.start)
                else:
                    positions = all_positions[start:stop]
                chains = _moved(positions, -self.shift * step)
                yield _Block(step, slice(done + start, done + stop), positions, chains)
            done += num_rows

    def _block(
        self,
        logits: Tensor,
        teacher: Teacher,
        entropy: Tensor | None,
        scratch: Tensor,
        chain: DraftChain | None,
        sums: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Turn logits into their gradients, add to the sums, and return loss and alpha of each row."""
        wide = logits.to(teacher.probs.dtype)
        hits = None if teacher.greedy is None else logits.argmax(-1) == teacher.greedy
        loss, alpha = loss_with_gradient(self.objective, wide, teacher, entropy, scratch, chain)
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
        counted = columns[1]
        assert counted is not None
        return counted, alpha


class _Block(NamedTuple):
    step: int
    rows: slice  # of the chunk's logits
    positions: slice | Tensor  # of the chunk's teachers
    chains: slice | Tensor


def _moved(index: slice | Tensor, by: int) -> slice | Tensor:
    if not by:
        return index
    return slice(index.start + by, index.stop + by) if isinstance(index, slice) else index + by


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
