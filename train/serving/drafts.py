"""What an engine wrote, and the drafts behind it."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PlacedDraft:
    """One draft and what became of it."""

    position: int  # tokens written before it
    token_ids: list[int]
    num_accepted: int


@dataclass(frozen=True)
class Served:
    """What an engine wrote, prompt by prompt."""

    completions: list[list[int]]
    drafts: list[list[PlacedDraft]] = field(default_factory=list)  # empty when they were not recorded

    @property
    def drafts_within_completions(self) -> list[list[PlacedDraft]]:
        """As the evaluator counts them."""
        return [
            cut_to_completion(drafts, len(completion))
            for drafts, completion in zip(self.drafts, self.completions, strict=True)
        ]


def cut_to_completion(drafts: Sequence[PlacedDraft], num_tokens: int) -> list[PlacedDraft]:
    """Counts accepted tokens as far as the text goes: engines accept behind the stop token too."""
    return [
        PlacedDraft(d.position, d.token_ids, min(d.num_accepted, num_tokens - d.position)) for d in drafts
    ]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
