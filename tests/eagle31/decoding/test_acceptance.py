import torch

from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.replay import replay


def walk(hits: list[list[bool]], counted: list[list[bool]], k: int) -> list[int]:
    """Replay as decoding does it, token by token."""
    accepted = []
    row = 0
    while row < len(hits):
        if not counted[row][0]:
            row += 1
            continue
        n = 0
        while n < k and counted[row][n] and hits[row][n]:
            n += 1
        accepted.append(n)
        row += n + 1
    return accepted


def test_replay_walks_as_decoding_does() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        hits = torch.rand(40, 5, generator=generator) < 0.6
        ends = torch.randint(0, 6, (40,), generator=generator)
        counted = torch.arange(5) < ends[:, None]
        for k in (1, 3, 5):
            expected = AcceptanceStats.from_lengths(k, walk(hits.tolist(), counted.tolist(), k))
            assert replay(hits, counted, k) == expected


def test_figures() -> None:
    stats = AcceptanceStats.from_lengths(3, [0, 3, 1, 1])
    assert stats.accepted_per_position == (3, 1, 1)
    assert stats.acceptance_length == 1 + 5 / 4
    assert stats.absolute_acceptance == (0.75, 0.25, 0.25)
    assert stats.conditional_acceptance == (0.75, 1 / 3, 1.0)
    assert stats + stats == AcceptanceStats.from_lengths(3, [0, 3, 1, 1] * 2)


def test_no_draft_is_an_acceptance_length_of_one() -> None:
    assert AcceptanceStats.from_lengths(2, []).acceptance_length == 1.0
