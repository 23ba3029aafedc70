"""Replay: the acceptance length in serving from one teacher-forced pass over completions of the target."""

from torch import Tensor

from eagle31.decoding.acceptance import AcceptanceStats


def replay(hits: Tensor, supervised: Tensor, k: int) -> AcceptanceStats:
    """Return the statistics of those of `replayed_drafts` that are within the text."""
    within = supervised[:, k - 1].tolist()
    drafts = replayed_drafts(hits, supervised, k)
    return AcceptanceStats.from_lengths(k, [accepted for row, accepted in drafts if within[row]])


def replayed_drafts(hits: Tensor, supervised: Tensor, k: int) -> list[tuple[int, int]]:
    """Go through teacher-forced predictions as decoding does; return each draft's row and accepted tokens.

    On a completion that the target wrote greedily, the inputs up to a row's first miss are the drafts
    themselves, so serving accepts as many tokens as there are leading hits. Decoding then resumes after the
    accepted tokens and the one that the target adds.

    The same holds for a completion that the target sampled, where drafts are greedy as vLLM's are: a greedy
    draft d is accepted with the target's probability p(d), and a rejected one is replaced by a token other
    than d. So, given the completion, the draft was accepted exactly where it is the completion's token.

    Args:
        hits: bool [T, K], whether row t's step-j prediction equals x[t+2+j]; the rows of one document.
        supervised: bool [T, K], whether (t, j) is a draft that serving would make.
        k: draft length, at most K.

    Source: vLLM's rejection sampler, without probabilities of the drafts.
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
        accepted.append((row, leading[row]))
        row += leading[row] + 1
    return accepted


def expected_replay(probabilities: Tensor, supervised: Tensor, k: int) -> AcceptanceStats:
    """Return the expected statistics of decoding, given the completion that it wrote.

    Whether a token is accepted is random, and with it where the next draft starts. With w[t, j] the
    probability that row t accepts its step-j token once those before it are accepted, a draft at row t
    accepts at least n tokens with probability w[t, 0] * ... * w[t, n-1]. The probability v[t] that a draft
    starts at row t follows from the first row on: after n accepted tokens the next draft starts at row
    t + n + 1. The expected number of drafts is the sum of v, and that of accepted tokens the sum of v[t]
    times the expected tokens of row t, over the rows whose k tokens are all within the text. With w of 0 and
    1 this is `replay`.

    Args:
        probabilities: float [T, K], w; the rows of one document.
        supervised: bool [T, K], whether (t, j) is a draft that serving would make.
        k: draft length, at most K.
    """
    assert 0 < k <= probabilities.shape[1]
    chains = (probabilities * supervised)[:, :k].double().cumprod(dim=1).tolist()
    drafts, within = supervised[:, 0].tolist(), supervised[:, k - 1].tolist()
    starts = [1.0] + [0.0] * (len(drafts) + k)
    num_drafts, accepted = 0.0, [0.0] * k
    for row, at_least in enumerate(chains):
        start = starts[row]
        if not drafts[row]:
            starts[row + 1] += start
            continue
        num_drafts += start * within[row]
        before = start
        for position, probability in enumerate(at_least):
            now = start * probability
            accepted[position] += now * within[row]
            starts[row + position + 1] += before - now
            before = now
        starts[row + k + 1] += before
    return AcceptanceStats(k, num_drafts, tuple(accepted))
