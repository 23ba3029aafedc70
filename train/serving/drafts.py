"""The completions of an engine, and the drafts that led to them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle31.decoding.speculative import Decoded


@dataclass(frozen=True)
class PlacedDraft:
    """One draft, and how many of its tokens were accepted."""

    position: int  # the number of tokens written before it
    token_ids: list[int]
    num_accepted: int


@dataclass(frozen=True)
class Served:
    """The completions of an engine, one per prompt."""

    completions: list[list[int]]
    drafts: list[list[PlacedDraft]] = field(default_factory=list)  # empty when they were not recorded

    @property
    def drafts_within_completions(self) -> list[list[PlacedDraft]]:
        """The drafts, counted as the evaluator counts them."""
        return [
            cut_to_completion(drafts, len(completion))
            for drafts, completion in zip(self.drafts, self.completions, strict=True)
        ]


def placed_drafts(decoded: Decoded) -> list[PlacedDraft]:
    """Return the drafts of eagle31's decoder with their positions; the first token needs no draft."""
    position, placed = 1, []
    for token_ids, num_accepted in zip(decoded.drafts, decoded.accepted, strict=True):
        placed.append(PlacedDraft(position, token_ids, num_accepted))
        position += num_accepted + 1
    return placed


def cut_to_completion(drafts: Sequence[PlacedDraft], num_tokens: int) -> list[PlacedDraft]:
    """Count accepted tokens up to the end of the completion; engines accept more after the stop token."""
    return [
        PlacedDraft(d.position, d.token_ids, min(d.num_accepted, num_tokens - d.position)) for d in drafts
    ]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
