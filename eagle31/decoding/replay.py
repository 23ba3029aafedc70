"""Replay: the acceptance length in serving from one teacher-forced pass."""

from torch import Tensor

from eagle31.decoding.acceptance import AcceptanceStats


def replay(hits: Tensor, supervised: Tensor, k: int) -> AcceptanceStats:
    """Go through teacher-forced predictions as greedy decoding does.

    On a completion that the target wrote greedily, the inputs up to a row's first miss are the drafts
    themselves, so serving accepts as many tokens as there are leading hits. Decoding then resumes after the
    accepted tokens and the one that the target adds.

    Args:
        hits: bool [T, K], whether row t's step-j prediction equals x[t+2+j]; the rows of one document.
        supervised: bool [T, K], whether (t, j) is a draft that serving would make.
        k: draft length, at most K.

    Source: vLLM's rejection sampler for greedy decoding.
    """
    assert 0 < k <= hits.shape[1]
    leading = (hits & supervised)[:, :k].long().cumprod(dim=1).sum(dim=1).tolist()
    drafts = supervised[:, 0].tolist()
    accepted = []
    row = 0
    while row < len(drafts):
        if not drafts[row]:
            row += 1
            continue
        accepted.append(leading[row])
        row += leading[row] + 1
    return AcceptanceStats.from_lengths(k, accepted)
