"""The losses of a draft: by their definitions, and with their gradients in closed form.

p is the target's distribution, q the drafter's. A pruned drafter gives no mass to tokens outside the draft
vocabulary. `kl` takes p renormalised over the draft vocabulary. `lk_lambda`, which is about the
acceptance rate alpha = sum min(p, q), takes p itself, so that the mass outside cannot be accepted.

    kl         cross entropy -sum p log q: the KL divergence up to p's entropy
    lk_lambda  lambda KL + (1 - lambda) (1 - alpha), lambda = exp(-eta alpha) taken as a constant

Source: LK losses (arXiv 2602.23881); alpha is that of speculative sampling (arXiv
2211.17192).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle31.choice import Choice

LK_ETA = 3.0  # how early lk_lambda turns from KL to the acceptance rate: that of its paper


class Loss(Choice):
    kl = "kl", "cross entropy with the target's distribution over the draft vocabulary"
    lk_lambda = "lk_lambda", "from KL to 1 - acceptance rate as the acceptance rate grows"

    @property
    def needs_full_vocabulary(self) -> bool:
        """Whether the gradient needs the target's distribution over its full vocabulary, and its entropy."""
        return self is Loss.lk_lambda


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at N positions. None stands for what was not requested."""

    probs: Tensor  # float32 or wider [N, Vd], renormalised over the draft vocabulary
    draft_mass: Tensor | None  # [N], the probability that the target gives to the draft vocabulary
    greedy: Tensor | None  # int64 [N], draft id of the target's greedy token; -1 outside

    def select(self, index: slice | Tensor) -> "Teacher":
        """Return the teacher at some of the positions."""
        draft_mass = None if self.draft_mass is None else self.draft_mass[index]
        return Teacher(self.probs[index], draft_mass, None if self.greedy is None else self.greedy[index])

    def entropy(self) -> Tensor:
        """Return the entropy of `probs`, [N]."""
        return -torch.xlogy(self.probs, self.probs).sum(-1)


class TeacherLogits(NamedTuple):
    """The same distribution as a GPU holds it: the probabilities are exp(logits - lse)."""

    logits: Tensor  # [N, Vd], in the target's dtype
    lse: Tensor  # float32 [N], the log-sum-exp of `logits`
    draft_mass: Tensor | None  # float32 [N]
    greedy: Tensor | None  # int32 [N]


def plain_alpha(logits: Tensor, teacher: Teacher) -> Tensor:
    """Return the acceptance rate of each row by its definition, for autograd and tests. [N, Vd] -> [N]."""
    target = teacher.probs * _required(teacher.draft_mass).unsqueeze(-1)
    return torch.minimum(target, logits.softmax(dim=-1)).sum(-1)


def plain_loss(objective: Loss, logits: Tensor, teacher: Teacher) -> Tensor:
    """Return the loss of each row by its definition, for autograd and tests. [N, Vd] -> [N]."""
    log_q = logits.log_softmax(dim=-1)
    cross = -(teacher.probs * log_q).sum(-1)
    if objective is Loss.kl:
        return cross
    alpha = plain_alpha(logits, teacher)
    weight = kl_weight(alpha.detach())
    return weight * (cross - teacher.entropy()) + (1 - weight) * (1 - alpha)


def kl_weight(alpha: Tensor) -> Tensor:
    """Return lambda, the weight of KL where the acceptance rate is alpha. [N] -> [N]."""
    return torch.exp(-LK_ETA * alpha)


def loss_with_gradient(
    objective: Loss,
    logits: Tensor,
    teacher: Teacher,
    entropy: Tensor | None,
    scratch: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Compute `plain_loss` and its gradient with few passes over [N, Vd].

    Args:
        logits: float32 or wider [N, Vd]; becomes d loss / d logits.
        entropy: the teacher's entropy [N], for lk_lambda.
        scratch: [N, Vd] like `logits`; overwritten.

    Returns:
        The loss [N], and alpha [N] where the teacher has its `draft_mass`.
    """
    probs = teacher.probs
    cross = torch.linalg.vecdot(probs, logits)
    top = logits.amax(-1)
    q = torch.softmax(logits, dim=-1, out=scratch)
    # The largest probability is exp(0) / sum, from which the log-sum-exp follows.
    cross = top - q.amax(-1).log_() - cross
    if objective is Loss.kl:
        alpha = None
        if teacher.draft_mass is not None:
            target = torch.mul(probs, teacher.draft_mass.unsqueeze(-1), out=logits)
            alpha = torch.minimum(q, target, out=target).sum(-1)
        torch.sub(q, probs, out=logits)
        return cross, alpha
    target = torch.mul(probs, _required(teacher.draft_mass).unsqueeze(-1), out=logits)
    # d(1 - alpha) / d logits = q (c - [q < p]), where c is the mass of q where q < p.
    below = q < target
    alpha = torch.minimum(q, target, out=target).sum(-1)
    slope = torch.mul(q, below, out=logits)
    slope = torch.addcmul(slope.neg_(), q, slope.sum(-1, keepdim=True), value=-1, out=slope)
    weight = kl_weight(alpha)
    divergence = cross - _required(entropy)
    slope.mul_((1 - weight).unsqueeze(-1)).addcmul_(q.sub_(probs), weight.unsqueeze(-1))
    return weight * divergence + (1 - weight) * (1 - alpha), alpha


def _required(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
