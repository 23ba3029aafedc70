"""The training step without any of its optimisations: the reference of the tests and of drift.

Every row is rolled out over all steps, attention builds its scores, and every step has all its logits.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.plain_attention import Attend, attend_by_run
from eagle31.kernels.query_run import document_starts, query_runs
from eagle31.kernels.transfer import to_device
from eagle31.model.eagle import EagleDrafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, step_rows, supervised_drafts
from eagle31.training.rollout import CHUNK_ROWS, prefill_in_parts
from eagle31.training.step import DepthSums
from eagle31.training.teacher import Teacher, full_teacher


def reference_rollout(
    drafter: EagleDrafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    rows: Tensor,
    num_steps: int,
    attend_rows: Attend,
    attend: Attend,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Roll `rows` out; same arguments as `eagle31.training.rollout.rollout`.

    Args:
        attend_rows, attend: the attention of all rows and that of `rows`.

    Yields:
        For each step the post-norm state that the head reads [R, H], and the state fed back [R, H].
    """
    last = batch.input_ids.shape[0] - 1
    every_row = torch.arange(last + 1)
    (on_device,) = to_device([every_row], rows.device)
    captured_state, keys = prefill_in_parts(
        drafter, embed_tokens, batch, on_device, every_row, attend_rows, CHUNK_ROWS
    )
    state, position_ids = captured_state[rows], batch.position_ids[rows]
    for step in range(num_steps):
        embeds = F.embedding(batch.input_ids[(rows + 1 + step).clamp(max=last)], embed_tokens)
        rotation = drafter.rotary(position_ids + step)
        normed, state, keys = drafter.rollout_step(step, state, embeds, rotation, attend, keys)
        yield normed, state


def plain_loss(logits: Tensor, teacher: Teacher) -> Tensor:
    """Return the loss of each row by its definition. [N, Vd] -> [N].

    It is the cross entropy -sum p log q: the KL divergence up to p's entropy, where p is the target's
    distribution, renormalised over the draft vocabulary, and q the drafter's.
    """
    return -(teacher.probs * logits.log_softmax(dim=-1)).sum(-1)


def plain_alpha(logits: Tensor, teacher: Teacher) -> Tensor:
    """Return the acceptance rate of each row by its definition, sum min(p, q). [N, Vd] -> [N].

    Here p is the target's distribution itself: its mass outside the draft vocabulary cannot be accepted.

    Source: speculative sampling (arXiv 2211.17192).
    """
    assert teacher.draft_mass is not None
    target = teacher.probs * teacher.draft_mass.unsqueeze(-1)
    return torch.minimum(target, logits.softmax(dim=-1)).sum(-1)


def reference_loss(
    drafter: EagleDrafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    *,
    num_steps: int,
    step_decay: float,
) -> tuple[Tensor, DepthSums]:
    """Return the same results as `eagle31.training.step.rollout_loss`."""
    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, num_steps)
    rows = step_rows(supervised)[0]
    lm_head = frozen.lm_head or drafter.lm_head
    total = torch.zeros((), device=rows.device)
    sums = []
    starts, config = document_starts(batch.document_ids), drafter.config
    every_row = torch.arange(len(starts), device=rows.device)
    attention = [
        partial(attend_by_run, runs=runs, scale=config.attention_scale, window=config.sliding_window)
        for runs in (query_runs(every_row, starts), query_runs(rows, starts))
    ]
    steps = reference_rollout(drafter, frozen.embed_tokens, batch, rows, num_steps, *attention)
    for step, (normed, _) in enumerate(steps):
        index = torch.nonzero(supervised[rows, step]).squeeze(1)  # of the rows that are still supervised
        with torch.no_grad():
            target_logits = frozen.target_head(batch.final_hidden_states[rows[index] + 1 + step])
            teacher = full_teacher(target_logits, frozen.draft_target_ids)
        assert teacher.greedy is not None
        logits = lm_head(normed[index]).to(teacher.probs.dtype)
        alpha = plain_alpha(logits, teacher)
        loss = plain_loss(logits, teacher).sum()
        weighted = step_decay**step * loss
        total = total + weighted
        with torch.no_grad():
            hits = logits.argmax(-1) == teacher.greedy
        num_rows = torch.tensor(len(index), device=rows.device)
        sums.append([num_rows, loss.detach(), hits.sum(), alpha.detach().sum(), weighted.detach()])
    return total, DepthSums(*(torch.stack([row[i].double() for row in sums]) for i in range(5)))
