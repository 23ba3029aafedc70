import torch

from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.replay import replay


def walk(hits: list[list[bool]], supervised: list[list[bool]], k: int) -> list[int]:
    """Return the accepted tokens of each draft, token by token as decoding does it."""
    accepted = []
    row = 0
    while row < len(hits):
        if not supervised[row][0]:
            row += 1
            continue
        n = 0
        while n < k and supervised[row][n] and hits[row][n]:
            n += 1
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
