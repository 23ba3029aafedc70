"""Acceptance statistics of chain drafts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class AcceptanceStats:
    """The accepted tokens of `num_drafts` chain drafts of `k` tokens each.

    A draft counts if its k tokens are all within the text. Of one that reaches past the end nobody knows how
    many tokens would have been accepted, and counting those within would make short texts look hard to draft.
    Expected numbers are fractions.
    """

    k: int
    num_drafts: float
    accepted_per_position: tuple[float, ...]  # [k], drafts whose first i+1 tokens were all accepted

    @property
    def num_accepted(self) -> float:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Return the tokens emitted per target forward: accepted draft tokens + 1."""
        return 1.0 + _fraction(self.num_accepted, self.num_drafts)

    @property
    def absolute_acceptance(self) -> tuple[float, ...]:
        """Return the fraction of all drafts accepted up to and including each position."""
        return tuple(_fraction(n, self.num_drafts) for n in self.accepted_per_position)

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """Return the fraction accepted at each position of the drafts accepted at the position before."""
        before = (self.num_drafts, *self.accepted_per_position)
        return tuple(map(_fraction, self.accepted_per_position, before))

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        assert self.k == other.k
        pairs = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return AcceptanceStats(self.k, self.num_drafts + other.num_drafts, tuple(a + b for a, b in pairs))

    @staticmethod
    def from_lengths(k: int, accepted: Sequence[int]) -> "AcceptanceStats":
        """Make the statistics of the number of accepted tokens of each draft."""
        counts = tuple(sum(n > position for n in accepted) for position in range(k))
        return AcceptanceStats(k, len(accepted), counts)

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {
            "acceptance_length": self.acceptance_length,
            "absolute_acceptance": list(self.absolute_acceptance),
            "conditional_acceptance": list(self.conditional_acceptance),
        }


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
