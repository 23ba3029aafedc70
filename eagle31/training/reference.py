"""The loss and the acceptance rate by their definitions, with which tests compare the faster ones."""

import torch
from torch import Tensor

from eagle31.training.teacher import Teacher


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
