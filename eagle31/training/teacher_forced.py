"""Drafts along a given text: compared with it, for replay, or with those that an engine made there."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.elementwise import widened
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, supervised_drafts
from eagle31.training.rollout import rollout, scheduled_rollout
from eagle31.training.schedule import RolloutSchedule, schedule_rollout


@torch.no_grad()
def greedy_hits(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    num_steps: int,
    chunk_rows: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Compare teacher-forced greedy predictions with the text.

    Returns:
        bool [T, K], whether row t's step-k prediction equals x[t+2+k]; and bool [T, K], the supervised
        drafts. Both are on the CPU.
    """
    supervised, schedule = _scheduled(drafter, batch, num_steps)
    head = (frozen.lm_head or drafter.lm_head).weight
    hits = torch.zeros_like(supervised, device=batch.input_ids.device)
    for step, (rows, normed) in enumerate(_drafted_states(drafter, frozen, batch, schedule)):
        greedy = torch.cat([F.linear(part, head).argmax(dim=-1) for part in normed.split(chunk_rows)])
        if frozen.draft_target_ids is not None:
            greedy = frozen.draft_target_ids[greedy]
        hits[rows, step] = greedy == batch.input_ids[rows + 2 + step]
    return hits.cpu(), supervised


@torch.no_grad()
def acceptance_given_text(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    num_steps: int,
    temperature: float,
    chunk_rows: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return how likely sampled drafts were accepted, given the text that the target sampled.

    By the classic rule a draft is drawn from the drafter's distribution q and accepted with probability
    min(1, p / q), so that a token x is drafted and accepted with probability min(p(x), q(x)), and written
    with probability p(x), the target's. Given that x was written, it was an accepted draft with probability
    min(p(x), q(x)) / p(x) = min(1, q(x) / p(x)). What follows in the text does not depend on it.

    Args:
        temperature: of both distributions; the target sampled the text at it, from its full vocabulary.

    Returns:
        float [T, K], the probability for row t's step-k token, x[t+2+k]; and bool [T, K], the supervised
        drafts. Both are on the CPU.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    supervised, schedule = _scheduled(drafter, batch, num_steps)
    head = (frozen.lm_head or drafter.lm_head).weight
    ids = torch.arange(len(frozen.embed_tokens), device=batch.input_ids.device)
    draft_ids = ids
    if frozen.draft_target_ids is not None:
        draft_ids = torch.full_like(ids, -1)
        draft_ids[frozen.draft_target_ids] = ids[: len(frozen.draft_target_ids)]
    found = torch.zeros(supervised.shape, dtype=torch.float64, device=ids.device)
    target_log_probs = found.new_zeros(len(batch.input_ids))  # of x[j+1] at j
    for step, (rows, normed) in enumerate(_drafted_states(drafter, frozen, batch, schedule)):
        if step == 0:  # every teacher of a later step is the teacher of another row's step 0
            for part in (rows + 1).split(chunk_rows):
                logits = frozen.target_head(batch.final_hidden_states[part])
                target_log_probs[part] = _log_probs(logits, batch.input_ids[part + 1], temperature)
        tokens = draft_ids[batch.input_ids[rows + 2 + step]]
        drafted = torch.cat(
            [
                _log_probs(F.linear(part, head), chosen.clamp(min=0), temperature)
                for part, chosen in zip(normed.split(chunk_rows), tokens.split(chunk_rows), strict=True)
            ]
        )
        ratio = (drafted - target_log_probs[rows + 1 + step]).clamp(max=0).exp()
        found[rows, step] = torch.where(tokens >= 0, ratio, 0)
    return found.cpu(), supervised


@torch.no_grad()
def logits_of_drafts(
    drafter: Drafter, frozen: FrozenParts, batch: PackedBatch, rows: Tensor, token_ids: Tensor
) -> Iterator[Tensor]:
    """Yield for each step the drafter's logits [R, Vd], given the tokens that were drafted before it.

    Args:
        rows: int64 [R], ascending, whose drafts are given; x[t+1] is the last token before row t's draft.
        token_ids: int64 [R, K], the drafted tokens.
    """
    head = (frozen.lm_head or drafter.lm_head).weight
    read = torch.cat([batch.input_ids[rows + 1, None], token_ids[:, :-1]], dim=1)
    for normed, _ in rollout(drafter, frozen.embed_tokens, batch, rows, token_ids.shape[1], read):
        yield F.linear(normed, head)


def _scheduled(drafter: Drafter, batch: PackedBatch, num_steps: int) -> tuple[Tensor, RolloutSchedule]:
    """Return the supervised drafts bool [T, K], on the CPU, and the rollout of their rows."""
    document_ids = batch.document_ids.cpu()
    supervised = supervised_drafts(batch.loss_mask.cpu(), document_ids, num_steps)
    device, key_reach = batch.input_ids.device, drafter.config.key_reach
    return supervised, schedule_rollout(supervised, document_ids, device, key_reach)


def _drafted_states(
    drafter: Drafter, frozen: FrozenParts, batch: PackedBatch, schedule: RolloutSchedule
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each step its rows int64 [R_k], and the states [R_k, H] that the draft head reads."""
    rollout = scheduled_rollout(drafter, frozen.embed_tokens, batch, schedule)
    for scheduled, (normed, _) in zip(schedule.chunks[0].steps, rollout, strict=True):
        yield scheduled.rows, normed


def _log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Return the log probability of one token per row in float64. logits: [N, V], token_ids: int64 [N]."""
    wide = logits.to(widened(logits.dtype)) / temperature
    chosen = wide.gather(-1, token_ids[:, None])[:, 0]
    return (chosen - wide.logsumexp(-1)).double()
