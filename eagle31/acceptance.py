"""Acceptance statistics, and replay: the served acceptance length from one teacher-forced pass."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor


@dataclass(frozen=True)
class AcceptanceStats:
    """What `num_drafts` chain drafts of up to `k` tokens gave.

    A draft that reaches the end of the text is cut there: what lies beyond is neither accepted nor rejected.
    """

    k: int
    num_drafts: int
    accepted_per_position: tuple[int, ...]  # [k], drafts whose first i+1 tokens were all accepted

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target forward: accepted drafts + 1."""
        return 1.0 + self.num_accepted / max(self.num_drafts, 1)

    @property
    def absolute_acceptance(self) -> tuple[float, ...]:
        """Share of all drafts accepted up to and including each position."""
        return tuple(n / max(self.num_drafts, 1) for n in self.accepted_per_position)

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """Share accepted at each position among the drafts accepted at the one before."""
        before = (self.num_drafts, *self.accepted_per_position)
        return tuple(n / max(m, 1) for n, m in zip(self.accepted_per_position, before, strict=False))

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        assert self.k == other.k
        pairs = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return AcceptanceStats(self.k, self.num_drafts + other.num_drafts, tuple(a + b for a, b in pairs))

    @staticmethod
    def from_lengths(k: int, accepted: Sequence[int]) -> "AcceptanceStats":
        """From the number of accepted tokens of each draft."""
        counts = tuple(sum(n > position for n in accepted) for position in range(k))
        return AcceptanceStats(k, len(accepted), counts)

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {
            "acceptance_length": self.acceptance_length,
            "absolute_acceptance": list(self.absolute_acceptance),
            "conditional_acceptance": list(self.conditional_acceptance),
        }


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
