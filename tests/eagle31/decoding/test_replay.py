import pytest
import torch

from eagle31.decoding.replay import expected_replay, replay


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
