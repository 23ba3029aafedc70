"""Replay: the served acceptance length from one teacher-forced pass."""

from torch import Tensor

from eagle31.decoding.acceptance import AcceptanceStats


def replay(hits: Tensor, counted: Tensor, k: int) -> AcceptanceStats:
    """Walks teacher-forced predictions as greedy decoding would.

    On text that the target wrote greedily, the inputs up to a row's first miss are the drafts themselves, so
    the number of leading hits is what serving accepts; decoding then goes on behind the accepted tokens and
    the target's own one.

    Args:
        hits: bool [T, K], row t's step-j prediction equals token x[t+2+j]; one document, in order.
        counted: bool [T, K], (t, j) is a draft that serving would make.
        k: draft length, at most K.

    Source: vLLM's rejection sampler for greedy decoding.
    """
    assert 0 < k <= hits.shape[1]
    leading = (hits & counted)[:, :k].long().cumprod(dim=1).sum(dim=1).tolist()
    drafts = counted[:, 0].tolist()
    accepted = []
    row = 0
    while row < len(drafts):
        if not drafts[row]:
            row += 1
            continue
        accepted.append(leading[row])
        row += leading[row] + 1
    return AcceptanceStats.from_lengths(k, accepted)
