import pytest
import torch

from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.replay import expected_replay, replay


def walk(hits: list[list[bool]], supervised: list[list[bool]], k: int) -> list[int]:
    """Return the accepted tokens of each draft that counts, token by token as decoding does it."""
    accepted = []
    row = 0
    while row < len(hits):
        if not supervised[row][0]:
            row += 1
            continue
        n = 0
        while n < k and supervised[row][n] and hits[row][n]:
            n += 1
        if supervised[row][k - 1]:
            accepted.append(n)
        row += n + 1
    return accepted


def test_replay_accepts_what_decoding_accepts() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        hits = torch.rand(40, 5, generator=generator) < 0.6
        ends = torch.randint(0, 6, (40,), generator=generator)
        supervised = torch.arange(5) < ends[:, None]
        for k in (1, 3, 5):
            expected = AcceptanceStats.from_lengths(k, walk(hits.tolist(), supervised.tolist(), k))
            assert replay(hits, supervised, k) == expected


@pytest.mark.parametrize("num_tokens", [9, 10, 23, 95])
def test_a_perfect_drafter_is_perfect_however_short_the_completion(num_tokens: int) -> None:
    # Row t drafts from the completion's token t + 1 on.
    supervised = torch.arange(num_tokens - 1)[:, None] + torch.arange(8) + 1 < num_tokens
    hits = torch.ones_like(supervised)
    for k in (1, 4, 8):
        for found in (replay(hits, supervised, k), expected_replay(hits.float(), supervised, k)):
            assert found.acceptance_length == k + 1
            assert found.conditional_acceptance == (1.0,) * k


def random_rows(seed: int, num_rows: int = 12, k: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return acceptance probabilities and supervised drafts, [T, k] each, of a text with two spans."""
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(num_rows, k, generator=generator)
    ends = torch.tensor([0, 0, *(min(k, n) for n in (4, 3, 2, 1, 0)), 0, *(min(k, n) for n in (3, 2, 1, 0))])
    return probabilities, torch.arange(k) < ends[:num_rows, None]


def expected_by_enumeration(
    probabilities: list[list[float]], supervised: list[list[bool]], k: int, row: int = 0
) -> tuple[float, list[float]]:
    """Return the expected drafts and accepted tokens per position from `row` on, by all outcomes."""
    if row >= len(probabilities):
        return 0.0, [0.0] * k
    if not supervised[row][0]:
        return expected_by_enumeration(probabilities, supervised, k, row + 1)
    within = supervised[row][k - 1]
    num_drafts, accepted = float(within), [0.0] * k
    reach = 1.0
    for n in range(k + 1):
        ends = n == k or not supervised[row][n]
        stop = reach * (1.0 if ends else 1.0 - probabilities[row][n])
        later_drafts, later = expected_by_enumeration(probabilities, supervised, k, row + n + 1)
        num_drafts += stop * later_drafts
        accepted = [a + stop * b for a, b in zip(accepted, later, strict=True)]
        if ends:
            break
        reach *= probabilities[row][n]
        accepted[n] += reach * within
    return num_drafts, accepted


def test_expected_replay_equals_the_sum_over_all_outcomes() -> None:
    for seed in range(4):
        probabilities, supervised = random_rows(seed)
        for k in (1, 2, 3):
            found = expected_replay(probabilities, supervised, k)
            drafts, accepted = expected_by_enumeration(probabilities.tolist(), supervised.tolist(), k)
            assert found.num_drafts == pytest.approx(drafts)
            assert found.accepted_per_position == pytest.approx(accepted)
            # Probabilities of 0 and 1 leave one outcome.
            hits = probabilities < 0.6
            assert expected_replay(hits.float(), supervised, k) == replay(hits, supervised, k)
