"""Which drafts the loss reads: those that serving would make."""

import torch
from torch import Tensor


def supervised_drafts(loss_mask: Tensor, document_ids: Tensor, num_steps: int) -> Tensor:
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


def supervised_positions(counted: Tensor) -> Tensor:
    """Rows with a counted first step, the only ones to roll out. bool [T, K] -> int64 [R]."""
    return torch.nonzero(counted[:, 0]).squeeze(1)
