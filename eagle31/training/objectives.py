"""What a draft is held against, and how: each loss as it is defined, and with its gradient in closed form.

p is the target's distribution, q the drafter's. A pruned drafter gives no mass to tokens outside the draft
vocabulary. `kl` compares with p renormalised over it; the others, which are about the acceptance rate
alpha = sum min(p, q), take p as it is, so that the mass outside is what cannot be accepted.

    kl         cross entropy -sum p log q: the KL divergence but for p's entropy
    full_kl    sum p log(p / q) over the whole vocabulary, for drafters that are not pruned
    tv         1 - alpha, the total variation distance
    lk_alpha   -log alpha
    lk_lambda  lambda KL + (1 - lambda) (1 - alpha), lambda = exp(-eta alpha) without a gradient of its own

Source: LK losses (arXiv 2602.23881), with its eta = 3; alpha is that of speculative sampling (arXiv
2211.17192).
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from eagle31.errors import UserError


class Loss(Enum):
    kl = "kl"
    full_kl = "full_kl"
    tv = "tv"
    lk_alpha = "lk_alpha"
    lk_lambda = "lk_lambda"


@dataclass(frozen=True)
class Objective:
    """The loss of one draft, and which drafts count."""

    loss: Loss = Loss.kl
    lk_eta: float = 3.0  # how early lk_lambda turns from KL to the acceptance rate
    # Whether a draft counts where the target's greedy token lies outside the draft vocabulary.
    count_outside_vocab: bool = True

    def check(self, pruned: bool) -> None:
        """Raises UserError when a drafter with this vocabulary cannot be trained on it."""
        if self.loss is Loss.full_kl and pruned:
            remedy = "It needs the whole vocabulary: set drafter.draft_vocab_size=null, or train.loss=kl."
            raise UserError("train.loss", self.loss.value, remedy)

    @property
    def compares_whole_target(self) -> bool:
        """Whether the gradient needs the target's distribution over its whole vocabulary."""
        return self.loss in (Loss.tv, Loss.lk_alpha, Loss.lk_lambda) or not self.count_outside_vocab


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at N positions. What is None was not asked for."""

    probs: Tensor  # float32 or wider [N, Vd], renormalised over the draft vocabulary
    share: Tensor | None  # [N], the probability that the whole distribution gives to the draft vocabulary
    greedy: Tensor | None  # int64 [N], draft id of the target's greedy token; -1 outside

    def at(self, places: slice | Tensor) -> "Teacher":
        """At some of the positions."""
        share = None if self.share is None else self.share[places]
        return Teacher(self.probs[places], share, None if self.greedy is None else self.greedy[places])

    def entropy(self) -> Tensor:
        """[N], of `probs`."""
        return -torch.xlogy(self.probs, self.probs).sum(-1)


def plain_loss(objective: Objective, logits: Tensor, teacher: Teacher) -> Tensor:
    """The loss of each row, [N, Vd] -> [N], as the definitions read. For autograd and tests."""
    log_q = logits.log_softmax(dim=-1)
    cross = -(teacher.probs * log_q).sum(-1)
    if objective.loss is Loss.kl:
        return cross
    divergence = cross - teacher.entropy()
    if objective.loss is Loss.full_kl:
        return divergence
    assert teacher.share is not None
    alpha = torch.minimum(teacher.probs * teacher.share.unsqueeze(-1), log_q.exp()).sum(-1)
    if objective.loss is Loss.tv:
        return 1 - alpha
    if objective.loss is Loss.lk_alpha:
        return -alpha.log()
    weight = (-objective.lk_eta * alpha.detach()).exp()
    return weight * divergence + (1 - weight) * (1 - alpha)


def loss_with_gradient(
    objective: Objective, logits: Tensor, teacher: Teacher, entropy: Tensor | None, scratch: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`plain_loss` and its gradient with as few walks over [N, Vd] as it takes.

    Args:
        logits: float32 or wider [N, Vd]; becomes d loss / d logits.
        entropy: the teacher's [N], for the losses that read it.
        scratch: [N, Vd] like `logits`, overwritten.

    Returns:
        loss [N], and alpha [N] where the teacher has its share.
    """
    probs = teacher.probs
    cross = torch.linalg.vecdot(probs, logits)
    top = logits.amax(-1)
    q = torch.softmax(logits, dim=-1, out=scratch)
    # The largest probability is exp(0) / sum, which is all that the log-sum-exp needs of the softmax.
    cross = top - q.amax(-1).log_() - cross
    if objective.loss in (Loss.kl, Loss.full_kl):
        alpha = None
        if teacher.share is not None:
            target = torch.mul(probs, teacher.share.unsqueeze(-1), out=logits)
            alpha = torch.minimum(q, target, out=target).sum(-1)
        torch.sub(q, probs, out=logits)
        return cross if objective.loss is Loss.kl else cross - _given(entropy), alpha
    target = torch.mul(probs, _given(teacher.share).unsqueeze(-1), out=logits)
    # d(1 - alpha) / d logits = q (c - [q < p]), c being the mass of q where q < p.
    below = q < target
    alpha = torch.minimum(q, target, out=target).sum(-1)
    slope = torch.mul(q, below, out=logits)
    slope = torch.addcmul(slope.neg_(), q, slope.sum(-1, keepdim=True), value=-1, out=slope)
    if objective.loss is Loss.tv:
        return 1 - alpha, alpha
    if objective.loss is Loss.lk_alpha:
        slope.div_(alpha.unsqueeze(-1))
        return -alpha.log(), alpha
    weight = (-objective.lk_eta * alpha).exp_()
    slope.mul_((1 - weight).unsqueeze(-1)).addcmul_(q.sub_(probs), weight.unsqueeze(-1))
    return weight * (cross - _given(entropy)) + (1 - weight) * (1 - alpha), alpha


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
