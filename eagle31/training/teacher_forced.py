"""Drafts along a given text: compared with it, for replay, or with those that an engine made there."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.elementwise import widened
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, captured_rows, supervised_drafts
from eagle31.training.rollout import CHUNK_ROWS, chunk_rollout, prefill_schedule, rollout
from eagle31.training.schedule import ChunkSchedule, schedule_rollout
from eagle31.training.step import LOGITS_AT_ONCE, MIN_POSITIONS


@torch.no_grad()
def greedy_hits(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    num_steps: int,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """Compare teacher-forced greedy predictions with the text.

    Args:
        batch: on the CPU, where its hidden states stay, in any dtype.
        chunk_rows: rows that are prefilled or rolled out together.

    Returns:
        bool [T, K], whether row t's step-k prediction equals x[t+2+k]; and bool [T, K], the supervised
        drafts. Both are on the CPU.
    """
    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, num_steps)
    head = drafter.head(frozen.lm_head)
    input_ids = batch.input_ids.to(head.device, non_blocking=True)
    hits = torch.zeros_like(supervised, device=head.device)
    size = logit_rows(head.device.type, len(frozen.embed_tokens))
    for _, step, rows, normed in _drafted_states(drafter, frozen, batch, supervised, chunk_rows):
        greedy = torch.cat([F.linear(x, head).argmax(dim=-1) for x in normed.split(size)])
        hits[rows, step] = frozen.target_ids(greedy) == input_ids[rows + 2 + step]
    return hits.cpu(), supervised


@torch.no_grad()
def acceptance_given_text(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    num_steps: int,
    temperature: float,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """Return how likely sampled drafts were accepted, given the text that the target sampled.

    By the classic rule a draft is drawn from the drafter's distribution q and accepted with probability
    min(1, p / q), so that a token x is drafted and accepted with probability min(p(x), q(x)), and written
    with probability p(x), the target's. Given that x was written, it was an accepted draft with probability
    min(p(x), q(x)) / p(x) = min(1, q(x) / p(x)). What follows in the text does not depend on it.

    Args:
        temperature: of both distributions; the target sampled the text at it, from its full vocabulary.
        batch, chunk_rows: those of `greedy_hits`.

    Returns:
        float [T, K], the probability for row t's step-k token, x[t+2+k]; and bool [T, K], the supervised
        drafts. Both are on the CPU.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, num_steps)
    head = drafter.head(frozen.lm_head)
    input_ids = batch.input_ids.to(head.device, non_blocking=True)
    ids = torch.arange(len(frozen.embed_tokens), device=head.device)
    draft_ids = ids
    if frozen.draft_target_ids is not None:
        draft_ids = torch.full_like(ids, -1)
        draft_ids[frozen.draft_target_ids] = ids[: len(frozen.draft_target_ids)]
    found = torch.zeros(supervised.shape, dtype=torch.float64, device=ids.device)
    target_log_probs = found.new_zeros(len(input_ids))  # of x[j+1] at j
    size = logit_rows(head.device.type, len(ids))
    for chunk, step, rows, normed in _drafted_states(drafter, frozen, batch, supervised, chunk_rows):
        if step == 0:
            parts = chunk.teacher_rows.split(size), chunk.teacher_rows_host.split(size)
            for part, host in zip(*parts, strict=True):
                states = captured_rows(batch.final_hidden_states, part, host, frozen.embed_tokens.dtype)
                logits = frozen.target_head(states)
                target_log_probs[part] = _log_probs(logits, input_ids[part + 1], temperature)
        tokens = draft_ids[input_ids[rows + 2 + step]]
        drafted = torch.cat(
            [
                _log_probs(F.linear(part, head), chosen.clamp(min=0), temperature)
                for part, chosen in zip(normed.split(size), tokens.split(size), strict=True)
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
        batch: as in `greedy_hits`.
        rows: int64 [R], ascending, whose drafts are given; x[t+1] is the last token before row t's draft.
        token_ids: int64 [R, K], the drafted tokens.
    """
    head = drafter.head(frozen.lm_head)
    batch = batch.to(head.device, states=False)
    read = torch.cat([batch.input_ids[rows + 1, None], token_ids[:, :-1]], dim=1)
    for state in rollout(drafter, frozen.embed_tokens, batch, rows, token_ids.shape[1], read):
        yield F.linear(state, head)


def by_draft_length(
    drafter: Drafter, longest: int, compare: Callable[[int], tuple[Tensor, Tensor]]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each draft length k = 1..longest k and what `compare` returns of drafts of k tokens, [T, k].

    The first tokens of a chain do not depend on how many follow them, so that it is called once for all.
    """
    if drafter.config.dspark is None:
        compared, supervised = compare(longest)
        yield from ((k, compared[:, :k], supervised[:, :k]) for k in range(1, longest + 1))
    else:
        yield from ((k, *compare(k)) for k in range(1, longest + 1))


def _drafted_states(
    drafter: Drafter, frozen: FrozenParts, batch: PackedBatch, supervised: Tensor, chunk_rows: int
) -> Iterator[tuple[ChunkSchedule, int, Tensor, Tensor]]:
    """Yield for each chunk and step its rows int64 [R_k], and the what the head reads [R_k, W]."""
    embed_tokens, key_reach = frozen.embed_tokens, drafter.config.key_reach
    device, document_ids = embed_tokens.device, batch.document_ids
    schedule = schedule_rollout(supervised, document_ids, device, key_reach, chunk_rows)
    batch = batch.to(device, states=False)
    state, keys = prefill_schedule(drafter, embed_tokens, batch, schedule, chunk_rows)
    for chunk in schedule.chunks:
        steps = chunk_rollout(drafter, embed_tokens, batch, chunk, state[chunk.query_index], keys)
        for step, (scheduled, read) in enumerate(zip(chunk.steps, steps, strict=True)):
            yield chunk, step, scheduled.rows, read


def logit_rows(device: str, vocab_size: int) -> int:
    """Return the number of rows whose logits are held at once."""
    return max(MIN_POSITIONS, LOGITS_AT_ONCE[device] // vocab_size)


def _log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Return the log probability of one token per row in float64. logits: [N, V], token_ids: int64 [N]."""
    wide = logits.to(widened(logits.dtype)) / temperature
    chosen = wide.gather(-1, token_ids[:, None])[:, 0]
    return (chosen - wide.logsumexp(-1)).double()
