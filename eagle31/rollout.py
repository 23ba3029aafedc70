"""Recursive rollouts: teacher-forced tokens, recursing hidden states."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.attention import document_spans
from eagle31.batch import PackedBatch
from eagle31.drafter import Drafter


def counted_drafts(loss_mask: Tensor, document_ids: Tensor, num_steps: int) -> Tensor:
    """Which (row, step) pairs are drafts that serving would make.

    Serving drafts only behind a token that the target itself sampled, so (t, k) counts when every token of
    x[t+1] .. x[t+2+k] is the assistant's, in row t's document.

    Args:
        loss_mask: bool [T].
        document_ids: int64 [T].

    Returns:
        bool [T, num_steps]; a step counts only if the one before does.
    """
    num_rows = loss_mask.shape[0]
    counted = loss_mask.new_zeros(num_rows, num_steps)
    # A run of assistant tokens x[t+1] .. x[t+1+k], grown by one token a step.
    running = loss_mask[1:] & (document_ids[1:] == document_ids[:-1])
    for step in range(num_steps):
        ahead = 2 + step
        if ahead >= num_rows:
            break
        same = document_ids[ahead:] == document_ids[: num_rows - ahead]
        running = running[: num_rows - ahead] & loss_mask[ahead:] & same
        counted[: num_rows - ahead, step] = running
    return counted


def rollout(
    drafter: Drafter, embed_tokens: Tensor, batch: PackedBatch, rows: Tensor, num_steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rolls `rows` out over the speculation steps.

    At step k row t has the embedding of x[t+1+k], RoPE position t+k, and predicts x[t+2+k].

    Args:
        embed_tokens: [V, H], the frozen embedding.
        rows: int64 [R], the rows that some loss reads.

    Yields:
        For each step the post-norm state that the head reads [R, H], and the state fed back [R, H].

    Source: EAGLE-3 (arXiv 2503.01840) training-time test; arXiv 2605.09992 for the post-norm feedback.
    """
    last = batch.input_ids.shape[0] - 1
    next_ids = batch.input_ids.roll(-1)
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
            # Beyond the document's end the token is arbitrary: such steps are never counted.
            token_ids = batch.input_ids[(rows + 1 + step).clamp(max=last)]
            output = drafter.next_step(
                state,
                F.embedding(token_ids, embed_tokens),
                batch.position_ids[rows] + step,
                spans,
                contexts,
            )
        normed = drafter.norm(output)
        state = drafter.feed_back(output, normed)
        yield normed, state


def counted_rows(counted: Tensor) -> Tensor:
    """Rows with a counted first step, the only ones to roll out. bool [T, K] -> int64 [R]."""
    return torch.nonzero(counted[:, 0]).squeeze(1)
