"""The drafts of one starting position as a chain, in which each is reached only through those before it.

Row t's rollout is the draft that serving makes once the target has sampled token t + 1: step k proposes
token t + 2 + k. So the drafts (t, 0), (t, 1), ... form one chain, as far as they are supervised. A chain has
one row and a different teacher for each draft: that of (t, k) is the target's distribution at t + 1 + k, and
it is also that of (t + 1, k - 1) in the next row's chain.

With alpha_k the probability that draft k is accepted given that those before it were, serving accepts at
least k + 1 drafts with probability P_k = alpha_0 ... alpha_k. The expected number of accepted drafts is the
sum of these tails,

    E = P_0 + P_1 + ... + P_(K-1),

and the acceptance length is E + 1. Its gradient is that of the alphas with the weights

    dE / d alpha_j = sum over k >= j of P_k / alpha_j = reach_j remaining_j
    reach_j     = alpha_0 ... alpha_(j-1), the probability that serving reaches draft j
    remaining_j = 1 + alpha_(j+1) (1 + alpha_(j+2) (1 + ...)), the drafts that are expected to be accepted
                  from j on once j is

The products leave alpha_j out instead of dividing by it, so an alpha of 0 is no special case. A draft's
gradient is that of `tv` times reach_j remaining_j, which needs all alphas of the chain.

The tokens before draft k are those of the text, which the target wrote, so they are samples from p. In
serving they are accepted drafts, which are samples from min(p, q) / alpha. Every teacher-forced loss makes
this approximation.

With reach near 0 the later drafts of a new drafter would learn nothing, and where q is near 0 on p's tokens
alpha itself has almost no gradient. So `acceptance_length` starts as KL: its loss is

    sum over k of lambda_k w_k KL_k + 1 - P_k,  lambda_k = exp(-eta alpha_k),

where w_k is the weight of the step, and the gradient of P through alpha_k is multiplied by 1 - lambda_k.
lambda is taken as a constant.

Source: the tails of speculative sampling's acceptance (arXiv 2211.17192, section 3.1, for equal alphas);
lambda is that of LK losses (arXiv 2602.23881). D-PACE in vllm-project/speculators
(losses/utils.py, `dpace_loss_decay`) weights cross entropy by the tails, computed from the probability that
the drafter gives to the text's token, with the smoothing that `smoothed` has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftChain:
    """What the gradient of N drafts needs of the other drafts of their chains. All are [N], or [K, N]."""

    step_weight: Tensor  # of the step, for the KL divergence
    reach: Tensor
    remaining: Tensor

    def select(self, step: int, chains: slice | Tensor) -> "DraftChain":
        """Return the drafts of one step in some of the chains, of a table [K, N]."""
        return DraftChain(
            self.step_weight[step, chains], self.reach[step, chains], self.remaining[step, chains]
        )


def reach_of(alphas: Tensor) -> Tensor:
    """Return the probability that serving reaches each draft. [K, N] -> [K, N]."""
    return torch.cat((torch.ones_like(alphas[:1]), alphas[:-1].cumprod(0)))


def remaining_of(alphas: Tensor) -> Tensor:
    """Return the expected number of drafts accepted from each one on, once it is. [K, N] -> [K, N].

    A chain that ends early has zeros from there on.
    """
    remaining = torch.ones_like(alphas)
    for step in range(len(alphas) - 2, -1, -1):
        torch.addcmul(remaining[step], alphas[step + 1], remaining[step + 1], out=remaining[step])
    return remaining


def smoothed(alphas: Tensor, smoothing: float) -> Tensor:
    """Return the acceptance rates, moved towards 1. [K, N] -> [K, N]."""
    return torch.lerp(alphas, torch.ones_like(alphas), smoothing) if smoothing else alphas
