"""The losses of a draft: by their definitions, and with their gradients in closed form.

p is the target's distribution, q the drafter's. A pruned drafter gives no mass to tokens outside the draft
vocabulary. `kl` takes p renormalised over the draft vocabulary. The others, which are about the acceptance
rate alpha = sum min(p, q), take p itself, so that the mass outside cannot be accepted.

    kl         cross entropy -sum p log q: the KL divergence up to p's entropy
    full_kl    sum p log(p / q) over the full vocabulary, for drafters that are not pruned
    tv         1 - alpha, the total variation distance
    lk_alpha   -log alpha
    lk_lambda  lambda KL + (1 - lambda) (1 - alpha), lambda = exp(-eta alpha) taken as a constant
    acceptance_length
               lambda KL + 1 - the probability that the draft is reached and accepted; `acceptance_chain` has
               its gradient, which depends on the other drafts of the same row

Source: LK losses (arXiv 2602.23881), with its eta = 3; alpha is that of speculative sampling (arXiv
2211.17192).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle31.choice import Choice
from eagle31.errors import UserError
from eagle31.training.acceptance_chain import DraftChain


class Loss(Choice):
    kl = "kl", "cross entropy with the target's distribution over the draft vocabulary"
    full_kl = "full_kl", "KL divergence over the full vocabulary, for drafters without a pruned one"
    tv = "tv", "total variation distance: 1 - acceptance rate"
    lk_alpha = "lk_alpha", "-log of the acceptance rate"
    lk_lambda = "lk_lambda", "from KL to total variation as the acceptance rate grows"
    acceptance_length = (
        "acceptance_length",
        "from KL to the expected number of accepted drafts as the acceptance rate grows",
    )


class StepWeights(Choice):
    decay = "decay", "step_decay to the power of the step"
    reach = "reach", "the probability that serving reaches the draft, as the drafter is now"


@dataclass(frozen=True)
class Objective:
    """The loss of one draft, its weight, and the drafts that are supervised."""

    loss: Loss = Loss.kl
    lk_eta: float = 3.0  # how early lk_lambda and acceptance_length turn from KL to the acceptance rate
    # Whether a draft is supervised where the target's greedy token is outside the draft vocabulary.
    count_outside_vocab: bool = True
    step_weights: StepWeights = StepWeights.decay
    reach_smoothing: float = 0.0  # in StepWeights.reach an acceptance rate a counts as (1 - s) a + s

    def check(self, pruned: bool) -> None:
        """Raise UserError when a drafter with this vocabulary cannot be trained on the loss."""
        if self.loss is Loss.full_kl and pruned:
            remedy = "It needs the full vocabulary: set drafter.draft_vocab_size=null, or train.loss=kl."
            raise UserError("train.loss", self.loss.value, remedy)
        if self.loss is Loss.acceptance_length and not self.count_outside_vocab:
            remedy = (
                "train.loss=acceptance_length is about all drafts of a position, because each is reached "
                "through those before it; set this to true, or choose train.loss=lk_lambda."
            )
            raise UserError("train.count_outside_vocab", False, remedy)

    @property
    def needs_full_vocabulary(self) -> bool:
        """Return whether the gradient needs the target's distribution over its full vocabulary."""
        return self.loss not in (Loss.kl, Loss.full_kl) or self.needs_chain or not self.count_outside_vocab

    @property
    def needs_entropy(self) -> bool:
        """Return whether the loss needs the teacher's entropy."""
        return self.loss in (Loss.full_kl, Loss.lk_lambda, Loss.acceptance_length)

    @property
    def needs_chain(self) -> bool:
        """Return whether a draft's gradient depends on the acceptance of the other drafts of its row."""
        return self.loss is Loss.acceptance_length or self.step_weights is StepWeights.reach


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


def plain_alpha(logits: Tensor, teacher: Teacher) -> Tensor:
    """Return the acceptance rate of each row by its definition, for autograd and tests. [N, Vd] -> [N]."""
    target = teacher.probs * _required(teacher.draft_mass).unsqueeze(-1)
    return torch.minimum(target, logits.softmax(dim=-1)).sum(-1)


def plain_loss(
    objective: Objective,
    logits: Tensor,
    teacher: Teacher,
    step_weight: Tensor | float = 1.0,
    reach: Tensor | float = 1.0,
) -> Tensor:
    """Return the loss of each row by its definition, for autograd and tests. [N, Vd] -> [N].

    Args:
        step_weight: of the KL divergence in `acceptance_length`; the other losses leave their weight to the
            caller.
        reach: the probability that the drafts before are accepted, for `acceptance_length`.
    """
    log_q = logits.log_softmax(dim=-1)
    cross = -(teacher.probs * log_q).sum(-1)
    if objective.loss is Loss.kl:
        return cross
    divergence = cross - teacher.entropy()
    if objective.loss is Loss.full_kl:
        return divergence
    alpha = plain_alpha(logits, teacher)
    if objective.loss is Loss.tv:
        return 1 - alpha
    if objective.loss is Loss.lk_alpha:
        return -alpha.log()
    weight = kl_weight(objective, alpha.detach())
    if objective.loss is Loss.acceptance_length:
        return step_weight * weight * divergence + 1 - reach * gated(objective, alpha)
    return weight * divergence + (1 - weight) * (1 - alpha)


def kl_weight(objective: Objective, alpha: Tensor) -> Tensor:
    """Return lambda, the weight of KL where the acceptance rate is alpha. [N] -> [N]."""
    return torch.exp(-objective.lk_eta * alpha)


def gated(objective: Objective, alpha: Tensor) -> Tensor:
    """Return alpha with its gradient multiplied by 1 - lambda, for autograd and tests. [N] -> [N]."""
    constant = alpha.detach()
    return constant + (1 - kl_weight(objective, constant)) * (alpha - constant)


def acceptance_rates(logits: Tensor, teacher: Teacher, scratch: Tensor, overwrite: bool = False) -> Tensor:
    """Return alpha [N] of each row.

    Args:
        logits: float32 or wider [N, Vd].
        scratch: [N, Vd] like `logits`; overwritten.
        overwrite: whether `logits` may be overwritten too, which saves memory.
    """
    q = torch.softmax(logits, dim=-1, out=scratch)
    mass = _required(teacher.draft_mass).unsqueeze(-1)
    target = torch.mul(teacher.probs, mass, out=logits if overwrite else None)
    return torch.minimum(q, target, out=target).sum(-1)


def loss_with_gradient(
    objective: Objective,
    logits: Tensor,
    teacher: Teacher,
    entropy: Tensor | None,
    scratch: Tensor,
    chain: DraftChain | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `plain_loss` and its gradient with few passes over [N, Vd].

    Args:
        logits: float32 or wider [N, Vd]; becomes d loss / d logits.
        entropy: the teacher's entropy [N], for the losses that need it.
        scratch: [N, Vd] like `logits`; overwritten.
        chain: for `acceptance_length`; None takes each row as the only draft of its position.

    Returns:
        The loss [N], and alpha [N] where the teacher has its `draft_mass`.
    """
    probs = teacher.probs
    cross = torch.linalg.vecdot(probs, logits)
    top = logits.amax(-1)
    q = torch.softmax(logits, dim=-1, out=scratch)
    # The largest probability is exp(0) / sum, from which the log-sum-exp follows.
    cross = top - q.amax(-1).log_() - cross
    if objective.loss in (Loss.kl, Loss.full_kl):
        alpha = None
        if teacher.draft_mass is not None:
            target = torch.mul(probs, teacher.draft_mass.unsqueeze(-1), out=logits)
            alpha = torch.minimum(q, target, out=target).sum(-1)
        torch.sub(q, probs, out=logits)
        return cross if objective.loss is Loss.kl else cross - _required(entropy), alpha
    target = torch.mul(probs, _required(teacher.draft_mass).unsqueeze(-1), out=logits)
    # d(1 - alpha) / d logits = q (c - [q < p]), where c is the mass of q where q < p.
    below = q < target
    alpha = torch.minimum(q, target, out=target).sum(-1)
    slope = torch.mul(q, below, out=logits)
    slope = torch.addcmul(slope.neg_(), q, slope.sum(-1, keepdim=True), value=-1, out=slope)
    if objective.loss is Loss.tv:
        return 1 - alpha, alpha
    if objective.loss is Loss.lk_alpha:
        slope.div_(alpha.unsqueeze(-1))
        return -alpha.log(), alpha
    weight = kl_weight(objective, alpha)
    divergence = cross - _required(entropy)
    if objective.loss is Loss.lk_lambda:
        slope.mul_((1 - weight).unsqueeze(-1)).addcmul_(q.sub_(probs), weight.unsqueeze(-1))
        return weight * divergence + (1 - weight) * (1 - alpha), alpha
    chain = chain or DraftChain(*(torch.ones_like(alpha) for _ in range(3)))
    slope.mul_(((1 - weight) * chain.reach * chain.remaining).unsqueeze(-1))
    weight *= chain.step_weight
    slope.addcmul_(q.sub_(probs), weight.unsqueeze(-1))
    return weight * divergence + 1 - chain.reach * alpha, alpha


def _required(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
