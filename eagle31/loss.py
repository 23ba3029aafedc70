"""The training objective: cross entropy against the target's distribution over the draft vocabulary.

This is the plain reference. The teacher is computed once per position, and the draft logits of a chunk of
rows are recomputed in the backward pass where a step has more than one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle31.batch import PackedBatch
from eagle31.drafter import Drafter
from eagle31.frozen import FrozenParts
from eagle31.rollout import counted_drafts, counted_rows, rollout

CHUNK_ROWS = 4096


@dataclass(frozen=True)
class DepthSums:
    """Sums over the counted rows of one micro-batch, per speculation step; divide by `num_rows`."""

    num_rows: Tensor  # [K]
    loss: Tensor  # [K]
    agreement: Tensor  # [K], rows whose greedy draft is the target's greedy token
    expected_acceptance: Tensor  # [K], sum of min(p, q)
    state_norm: Tensor  # [K], L2 norm of the fed-back state

    def stacked(self) -> Tensor:
        """float64 [5, K], ready for one all-reduce."""
        return torch.stack([getattr(self, f.name).double() for f in fields(self)])

    @staticmethod
    def unstack(stacked: Tensor) -> "DepthSums":
        return DepthSums(*stacked.unbind(0))


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at some positions."""

    draft_probs: Tensor  # float32 [J, Vd], over the draft vocabulary, summing to one
    target_probs: Tensor  # float32 [J, Vd], the same entries of the full distribution
    argmax: Tensor  # int64 [J], the target's greedy token, a target id


@torch.no_grad()
def teacher_distribution(logits: Tensor, draft_target_ids: Tensor | None) -> Teacher:
    """From the target's logits [J, V]; `draft_target_ids` int64 [Vd], None for the full vocabulary."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    argmax = wide.argmax(dim=-1)
    if draft_target_ids is None:
        probs = wide.softmax(dim=-1)
        return Teacher(probs, probs, argmax)
    kept = wide[:, draft_target_ids]
    log_total = wide.logsumexp(dim=-1, keepdim=True)
    return Teacher(kept.softmax(dim=-1), (kept - log_total).exp(), argmax)


def step_sums(
    states: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    draft_probs: Tensor,
    target_probs: Tensor,
    teacher_argmax: Tensor,
    draft_target_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, greedy agreement and expected acceptance summed over rows [N, H]; each a scalar."""
    logits = lm_head(states)
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    loss = -(draft_probs * log_q).sum()
    with torch.no_grad():
        greedy = log_q.argmax(dim=-1)
        if draft_target_ids is not None:
            greedy = draft_target_ids[greedy]
        agreement = (greedy == teacher_argmax).sum()
        expected = torch.minimum(log_q.exp(), target_probs).sum()
    return loss, agreement, expected


def rollout_loss(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    *,
    num_steps: int,
    step_decay: float,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, DepthSums]:
    """Unnormalised loss of one micro-batch, sum over steps of decay^k times the sum of cross entropies.

    Row t's step-k teacher is the target's distribution at index t+1+k. Divide by the number of counted rows
    of the whole optimizer step, over all ranks and micro-batches.

    Returns:
        A scalar, and the sums per step.
    """
    counted = counted_drafts(batch.loss_mask, batch.document_ids, num_steps)
    rows = counted_rows(counted)
    lm_head = frozen.lm_head or drafter.lm_head
    needed, teacher = _teacher(batch, counted, frozen)
    position = torch.zeros(batch.input_ids.shape[0], dtype=torch.long, device=rows.device)
    position[needed] = torch.arange(needed.shape[0], device=rows.device)

    total = frozen.embed_tokens.new_zeros(
        (), dtype=torch.promote_types(frozen.embed_tokens.dtype, torch.float32)
    )
    sums: list[list[Tensor]] = []
    for step, (normed, state) in enumerate(rollout(drafter, frozen.embed_tokens, batch, rows, num_steps)):
        alive = torch.nonzero(counted[rows, step]).squeeze(1)
        chunks = alive.split(chunk_rows)
        step_total = [total.new_zeros(()) for _ in range(3)]
        for chunk in chunks:
            at = position[rows[chunk] + 1 + step]
            inputs = (
                normed[chunk],
                lm_head,
                teacher.draft_probs[at],
                teacher.target_probs[at],
                teacher.argmax[at],
                frozen.draft_target_ids,
            )
            if len(chunks) > 1:
                parts = checkpoint(step_sums, *inputs, use_reentrant=False)
            else:
                parts = step_sums(*inputs)
            step_total = [a + b for a, b in zip(step_total, parts, strict=True)]
        norm = state.detach()[alive].float().norm(dim=-1).sum()
        total = total + step_decay**step * step_total[0]
        sums.append([alive.new_tensor(alive.shape[0]), step_total[0].detach(), *step_total[1:], norm])
    columns = [torch.stack([row[i].double() for row in sums]) for i in range(5)]
    return total, DepthSums(*columns)


def _teacher(batch: PackedBatch, counted: Tensor, frozen: FrozenParts) -> tuple[Tensor, Teacher]:
    """The target's distribution at every index that some counted pair reads, each computed once."""
    num_rows, num_steps = counted.shape
    needed = torch.zeros(num_rows, dtype=torch.bool, device=counted.device)
    for step in range(num_steps):
        needed[1 + step :] |= counted[: num_rows - 1 - step, step]
    index = torch.nonzero(needed).squeeze(1)
    with torch.no_grad():
        logits = frozen.target_head(batch.last_hidden_states[index])
    return index, teacher_distribution(logits, frozen.draft_target_ids)


@torch.no_grad()
def greedy_hits(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    num_steps: int,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """Teacher-forced greedy predictions against the text, for replay.

    Returns:
        hits bool [T, K], row t's step-k prediction equals x[t+2+k]; counted bool [T, K].
    """
    counted = counted_drafts(batch.loss_mask, batch.document_ids, num_steps)
    rows = counted_rows(counted)
    lm_head = frozen.lm_head or drafter.lm_head
    hits = torch.zeros_like(counted)
    last = batch.input_ids.shape[0] - 1
    for step, (normed, _) in enumerate(rollout(drafter, frozen.embed_tokens, batch, rows, num_steps)):
        greedy = torch.cat([lm_head(part).argmax(dim=-1) for part in normed.split(chunk_rows)])
        if frozen.draft_target_ids is not None:
            greedy = frozen.draft_target_ids[greedy]
        hits[rows, step] = greedy == batch.input_ids[(rows + 2 + step).clamp(max=last)]
    return hits & counted, counted
