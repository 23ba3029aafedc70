"""The training step without any of its shortcuts: the yardstick of the tests.

Every row lives through all the steps, attention builds its scores, and every step has all its logits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.model.attention import document_spans
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch
from eagle31.training.objectives import Objective, plain_loss
from eagle31.training.step import DepthSums, whole_teacher
from eagle31.training.supervision import supervised_drafts, supervised_positions


def reference_rollout(
    drafter: Drafter, embed_tokens: Tensor, batch: PackedBatch, rows: Tensor, num_steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Same arguments and results as `eagle31.training.rollout.rollout`."""
    last = batch.input_ids.shape[0] - 1
    next_ids = torch.cat((batch.input_ids[1:], batch.input_ids[-1:]))
    output, contexts = drafter.first_step(
        drafter.fuse(batch.aux_hidden_states),
        F.embedding(next_ids, embed_tokens),
        batch.position_ids,
        batch.document_ids,
        rows,
    )
    state = output
    spans = document_spans(rows, batch.document_ids)
    for step in range(num_steps):
        if step:
            token_ids = batch.input_ids[(rows + 1 + step).clamp(max=last)]
            embeds = F.embedding(token_ids, embed_tokens)
            output = drafter.next_step(state, embeds, batch.position_ids[rows] + step, spans, contexts)
        normed = drafter.norm(output)
        state = drafter.feed_back(output, normed)
        yield normed, state


def reference_loss(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    *,
    num_steps: int,
    step_decay: float,
    objective: Objective | None = None,
) -> tuple[Tensor, DepthSums]:
    """Same results as `eagle31.training.step.rollout_loss`."""
    objective = objective or Objective()
    counted = supervised_drafts(batch.loss_mask, batch.document_ids, num_steps)
    rows = supervised_positions(counted)
    lm_head = frozen.lm_head or drafter.lm_head
    total = torch.zeros((), device=rows.device)
    sums = []
    steps = reference_rollout(drafter, frozen.embed_tokens, batch, rows, num_steps)
    for step, (normed, state) in enumerate(steps):
        alive = torch.nonzero(counted[rows, step]).squeeze(1)
        with torch.no_grad():
            target_logits = frozen.target_head(batch.final_hidden_states[rows[alive] + 1 + step])
            teacher = whole_teacher(target_logits, frozen.draft_target_ids)
        assert teacher.share is not None
        assert teacher.greedy is not None
        logits = lm_head(normed[alive]).to(teacher.probs.dtype)
        weight = torch.ones_like(teacher.share)
        if not objective.count_outside_vocab:
            weight = (teacher.greedy >= 0).to(weight)
        loss = (plain_loss(objective, logits, teacher) * weight).sum()
        total = total + step_decay**step * loss
        with torch.no_grad():
            hits = (logits.argmax(-1) == teacher.greedy) * weight
            target = teacher.probs * teacher.share.unsqueeze(-1)
            overlap = torch.minimum(logits.softmax(-1), target).sum(-1) * weight
        norm = state.detach()[alive].norm(dim=-1, dtype=weight.dtype).sum()
        sums.append([weight.sum(), loss.detach(), hits.sum(), overlap.sum(), norm])
    return total, DepthSums(*(torch.stack([row[i].double() for row in sums]) for i in range(5)))
