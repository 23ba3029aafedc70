"""The drafts that the loss supervises: those that serving would make."""

import torch
from torch import Tensor


def supervised_drafts(loss_mask: Tensor, document_ids: Tensor, num_steps: int) -> Tensor:
    """Return the (row, step) pairs that are drafts which serving would make.

    Serving drafts only after a token that the target itself sampled. So (t, k) is supervised when the
    assistant wrote every token of x[t+1] .. x[t+2+k], in row t's document.

    Args:
        loss_mask: bool [T].
        document_ids: int64 [T].

    Returns:
        bool [T, num_steps]; a step is true only where the step before is.
    """
    num_rows = loss_mask.shape[0]
    supervised = loss_mask.new_zeros(num_rows, num_steps)
    # Whether the assistant wrote x[t+1] .. x[t+1+k], which grows by one token at each step.
    running = loss_mask[1:] & (document_ids[1:] == document_ids[:-1])
    for step in range(num_steps):
        ahead = 2 + step
        if ahead >= num_rows:
            break
        same = document_ids[ahead:] == document_ids[: num_rows - ahead]
        running = running[: num_rows - ahead] & loss_mask[ahead:] & same
        supervised[: num_rows - ahead, step] = running
    return supervised


def supervised_positions(supervised: Tensor) -> Tensor:
    """Return the rows whose first step is supervised, the only ones to roll out. bool [T, K] -> int64 [R]."""
    return torch.nonzero(supervised[:, 0]).squeeze(1)
