"""Holds vLLM's drafts and texts against the evaluator's."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.speculative import Decoded
from train.evaluation.decoding import NEAR_TIE
from train.serving.drafts import PlacedDraft, Served, common_length

DRAFTS_PER_NEAR_TIE = 200
TOLERANCE = 0.05  # of the acceptance length, where rounding decides many tokens


@dataclass(frozen=True)
class Difference:
    """Where the two part."""

    what: str  # "drafted tokens", "accepted", "no draft", "completion"
    prompt: int
    position: int  # tokens written before it
    ours: list[int]
    vllm: list[int]
    margin: float | None  # between the two top logits there; None where ours has none

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and self.margin < NEAR_TIE

    def __str__(self) -> str:
        margin = "" if self.margin is None else f", top logits {self.margin:.2g} apart"
        where = f"prompt {self.prompt}, position {self.position}"
        return f"{where}: {self.what}: eagle31 {self.ours}, vLLM {self.vllm}{margin}"


@dataclass(frozen=True)
class Comparison:
    """Both sides' counts, and every place where they differ."""

    ours: AcceptanceStats
    vllm: AcceptanceStats
    num_compared: int  # drafts that both made behind the same text
    drafts: list[Difference]  # at most one a draft, near-ties among them
    plain_completions: list[Difference]  # vLLM with the drafter against vLLM without
    completions: list[Difference]  # vLLM with the drafter against the evaluator
    num_completions: int
    exact: bool  # float32: every draft has to be equal; else the acceptance length within TOLERANCE

    @property
    def near_ties(self) -> list[Difference]:
        return [one for one in self.drafts if one.near_tie]

    @property
    def differences(self) -> list[Difference]:
        """Of drafts, near-ties apart."""
        return [one for one in self.drafts if not one.near_tie]

    @property
    def num_equal(self) -> int:
        return self.num_compared - sum(one.what != "no draft" for one in self.drafts)

    @property
    def relative_gap(self) -> float:
        """Of the acceptance length."""
        return self.vllm.acceptance_length / self.ours.acceptance_length - 1

    @property
    def failures(self) -> list[str]:
        """Why the two are not the same; empty when they are."""
        if not self.vllm.num_drafts:
            return ["vLLM drafted nothing"]
        if not self.exact:
            gap = abs(self.relative_gap)
            return [f"acceptance lengths differ by {gap:.1%}"] if gap > TOLERANCE else []
        allowed = max(1, self.num_compared // DRAFTS_PER_NEAR_TIE)
        found = {
            f"{len(self.differences)} drafts differ": self.differences,
            f"{len(self.near_ties)} drafts differ by near-ties, {allowed} may": self.near_ties[allowed:],
            "no draft could be compared": not self.num_compared,
            "the text is not vLLM's own": _real(self.plain_completions),
            "the text is not the evaluator's": _real(self.completions),
        }
        return [reason for reason, where in found.items() if where]

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        listed = {
            name: [asdict(one) | {"near_tie": one.near_tie} for one in getattr(self, name)]
            for name in ("drafts", "plain_completions", "completions")
        }
        return {
            "passed": self.passed,
            "failures": self.failures,
            "exact": self.exact,
            "eagle31": self.ours.to_json(),
            "vllm": self.vllm.to_json(),
            "num_compared": self.num_compared,
            "num_equal": self.num_equal,
            "num_near_ties": len(self.near_ties),
            "num_different": len(self.differences),
            "num_completions": self.num_completions,
            "differing": listed,
        }


def check_case(
    reference: Sequence[Decoded],
    served: Served,
    plain: Served | None,
    k: int,
    *,
    exact: bool = True,
) -> Comparison:
    """Holds one drafter's drafts, accepted counts and texts against the evaluator's, greedy on both sides.

    Args:
        reference: the evaluator's, one for each prompt, with its drafts and margins.
        plain: the engine without the drafter; None leaves that comparison out.
        k: tokens a draft.
    """
    ours = [placed_drafts(one) for one in reference]
    theirs = served.drafts_within_completions
    num_compared, differences = 0, []
    for prompt, one in enumerate(reference):
        compared, found = compare_drafts(
            prompt, one, ours[prompt], theirs[prompt], served.completions[prompt]
        )
        num_compared += compared
        differences += found
    return Comparison(
        ours=_stats(ours, k),
        vllm=_stats(theirs, k),
        num_compared=num_compared,
        drafts=differences,
        plain_completions=compare_completions(reference, plain.completions, served.completions)
        if plain
        else [],
        completions=compare_completions(reference, [one.token_ids for one in reference], served.completions),
        num_completions=len(reference),
        exact=exact,
    )


def placed_drafts(decoded: Decoded) -> list[PlacedDraft]:
    """Where the evaluator's drafts start: the prompt alone gives the first token, without a draft."""
    position, placed = 1, []
    for token_ids, num_accepted in zip(decoded.drafts, decoded.accepted, strict=True):
        placed.append(PlacedDraft(position, token_ids, num_accepted))
        position += num_accepted + 1
    return placed


def compare_drafts(
    prompt: int,
    reference: Decoded,
    ours: Sequence[PlacedDraft],
    theirs: Sequence[PlacedDraft],
    completion: Sequence[int],
) -> tuple[int, list[Difference]]:
    """Compares the drafts of one prompt that start behind the same text.

    A draft depends on the text before it alone. After a difference the two may draft at other positions for a
    while; wherever both do again, they are compared again.

    Returns:
        The number of drafts compared, and the differences.
    """
    margins = {d.position: m for d, m in zip(ours, reference.draft_margins, strict=True)}
    our_drafts = {draft.position: draft for draft in ours}
    their_drafts = {draft.position: draft for draft in theirs}
    num_common = common_length(reference.token_ids, completion)
    num_compared = 0
    found: list[Difference] = []
    for position in sorted(our_drafts.keys() | their_drafts.keys()):
        if position > num_common:
            break
        own, other = our_drafts.get(position), their_drafts.get(position)
        if own and other:
            num_compared += 1
            difference = _difference(prompt, own, other, margins[position], reference.margins)
        elif found:
            continue  # out of step because of the difference before
        else:
            mine, vllms = (draft.token_ids if draft else [] for draft in (own, other))
            difference = Difference("no draft", prompt, position, mine, vllms, margin=None)
        if difference:
            found.append(difference)
    return num_compared, found


def compare_completions(
    reference: Sequence[Decoded], expected: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[Difference]:
    """Where each text first leaves the expected one, with the target's margin if the evaluator got there."""
    found = []
    for prompt, (one, own, completion) in enumerate(zip(reference, expected, completions, strict=True)):
        if list(own) == list(completion):
            continue
        first = common_length(own, completion)
        # Behind a place where the evaluator's text is another one, its margins say nothing.
        known = first < len(one.margins) and one.token_ids[:first] == list(completion[:first])
        ended = first in (len(own), len(completion))
        margin = one.margins[first] if known and not ended else None
        found.append(
            Difference(
                "completion",
                prompt,
                first,
                list(own[first : first + 1]),
                list(completion[first : first + 1]),
                margin,
            )
        )
    return found


def count_completions(differences: Sequence[Difference], num_completions: int) -> Counter[str]:
    """identical, near-tie, different."""
    near_ties = sum(one.near_tie for one in differences)
    return Counter(
        {
            "identical": num_completions - len(differences),
            "near-tie": near_ties,
            "different": len(differences) - near_ties,
        }
    )


def _difference(
    prompt: int,
    own: PlacedDraft,
    other: PlacedDraft,
    margins: Sequence[float],
    target_margins: Sequence[float],
) -> Difference | None:
    """The graver one, when both the drafted tokens and the accepted counts differ on grounds of their own."""
    found = []
    num_same = common_length(own.token_ids, other.token_ids)
    if own.token_ids != other.token_ids:
        margin = _at(margins, num_same)
        found.append(
            Difference("drafted tokens", prompt, own.position, own.token_ids, other.token_ids, margin)
        )
    decided = min(own.num_accepted, other.num_accepted)
    if own.num_accepted != other.num_accepted and decided < num_same:
        # Both drafted this token; one target took it and the other did not.
        margin = _at(target_margins, own.position + decided)
        found.append(
            Difference("accepted", prompt, own.position, [own.num_accepted], [other.num_accepted], margin)
        )
    return next((one for one in found if not one.near_tie), found[0] if found else None)


def _at(margins: Sequence[float], index: int) -> float | None:
    """None behind the end, where one side stopped and the other did not."""
    return margins[index] if index < len(margins) else None


def _stats(drafts: Sequence[Sequence[PlacedDraft]], k: int) -> AcceptanceStats:
    return AcceptanceStats.from_lengths(k, [d.num_accepted for one in drafts for d in one])


def _real(differences: Sequence[Difference]) -> list[Difference]:
    return [one for one in differences if not one.near_tie]
