"""Parity with vLLM: its drafts and completions, compared with those of eagle31's evaluator."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data.progress import tracked
from data.target.cached_decoding import TargetDecoder
from data.target.loading import load_target
from data.target.modules import locate
from data.target.parts import TargetParts
from data.target.spec import TargetSpec
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.speculative import Decoded, decode_speculatively
from eagle31.export.read import load_export
from eagle31.model.frozen import FrozenParts
from train.drafter.published import target_defaults
from train.engines.serving import PlacedDraft, Served, acceptance, common_length, placed_drafts
from train.tables import aligned

_NUM_SHOWN = 8  # differences in a list
DRAFTS_PER_NEAR_TIE = 200
TOLERANCE = 0.05  # relative, of the acceptance length in half precision, where rounding decides many tokens


@dataclass(frozen=True)
class Difference:
    """One difference between the evaluator and vLLM."""

    what: str  # "drafted tokens", "accepted", "no draft", "completion"
    prompt: int
    position: int  # number of tokens of the completion before it
    ours: list[int]
    vllm: list[int]
    margin: float | None  # between the evaluator's two top logits there; None where it has none
    bound: float = 0.0  # the margin up to which rounding may decide

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and self.margin <= self.bound

    def __str__(self) -> str:
        margin = "" if self.margin is None else f", top logits {self.margin:.2g} apart"
        where = f"prompt {self.prompt}, position {self.position}"
        return f"{where}: {self.what}: eagle31 {self.ours}, vLLM {self.vllm}{margin}"


@dataclass(frozen=True)
class Comparison:
    """The counts of both sides, and every difference between them."""

    ours: AcceptanceStats
    vllm: AcceptanceStats
    num_compared: int  # drafts that both made after the same tokens
    drafts: list[Difference]  # at most one per draft, near-ties included
    plain_completions: list[Difference]  # vLLM with the drafter against vLLM without
    completions: list[Difference]  # vLLM with the drafter against the evaluator
    num_completions: int
    exact: (
        bool  # float32: every draft must be equal; otherwise the acceptance length must be within TOLERANCE
    )

    @property
    def near_ties(self) -> list[Difference]:
        return [one for one in self.drafts if one.near_tie]

    @property
    def differences(self) -> list[Difference]:
        """The drafts that differ, without near-ties."""
        return [one for one in self.drafts if not one.near_tie]

    @property
    def num_equal(self) -> int:
        return self.num_compared - sum(one.what != "no draft" for one in self.drafts)

    @property
    def relative_gap(self) -> float:
        """The relative difference of vLLM's acceptance length from the evaluator's."""
        return self.vllm.acceptance_length / self.ours.acceptance_length - 1

    @property
    def failures(self) -> list[str]:
        """The reasons why the two sides are not the same; empty if they are."""
        if not self.vllm.num_drafts:
            return ["vLLM drafted nothing"]
        if not self.exact:
            gap = abs(self.relative_gap)
            return [f"acceptance lengths differ by {gap:.1%}"] if gap > TOLERANCE else []
        allowed = max(1, self.num_compared // DRAFTS_PER_NEAR_TIE)
        found = {
            f"{len(self.differences)} drafts differ": self.differences,
            f"{len(self.near_ties)} drafts differ by near-ties; {allowed} may": self.near_ties[allowed:],
            "no draft could be compared": not self.num_compared,
            "completions differ from vLLM's without the drafter": _without_near_ties(self.plain_completions),
            "completions differ from the evaluator's": _without_near_ties(self.completions),
        }
        return [reason for reason, differs in found.items() if differs]

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
    """Compare vLLM's drafts, accepted counts and completions with the evaluator's; both decode greedily.

    Args:
        reference: the evaluator's completion of each prompt, with drafts and margins.
        plain: vLLM without the drafter; None skips that comparison.
        k: the number of tokens per draft.
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
        ours=acceptance(k, ours, [one.token_ids for one in reference]),
        vllm=acceptance(k, theirs, served.completions),
        num_compared=num_compared,
        drafts=differences,
        plain_completions=compare_completions(reference, plain.completions, served.completions)
        if plain
        else [],
        completions=compare_completions(reference, [one.token_ids for one in reference], served.completions),
        num_completions=len(reference),
        exact=exact,
    )


def compare_drafts(
    prompt: int,
    reference: Decoded,
    ours: Sequence[PlacedDraft],
    theirs: Sequence[PlacedDraft],
    completion: Sequence[int],
) -> tuple[int, list[Difference]]:
    """Compare the drafts of one prompt that follow the same tokens.

    A draft depends only on the tokens before it. After a difference the two sides may draft at different
    positions for a while; they are compared again where both draft at the same position.

    Returns:
        The number of drafts compared, and the differences.
    """
    margins = {
        draft.position: list(zip(margins, bounds, strict=True))
        for draft, margins, bounds in zip(ours, reference.draft_margins, reference.draft_bounds, strict=True)
    }
    target_margins = list(zip(reference.margins, reference.bounds, strict=True))
    our_drafts = {draft.position: draft for draft in ours}
    their_drafts = {draft.position: draft for draft in theirs}
    num_common = common_length(reference.token_ids, completion)
    num_compared = 0
    found: list[Difference] = []
    for position in sorted(our_drafts.keys() | their_drafts.keys()):
        if position > num_common:
            break
        our_draft, their_draft = our_drafts.get(position), their_drafts.get(position)
        if our_draft and their_draft:
            num_compared += 1
            difference = _difference(prompt, our_draft, their_draft, margins[position], target_margins)
        elif found:
            continue  # the earlier difference moved the positions of the drafts
        else:
            ours_ids, theirs_ids = (draft.token_ids if draft else [] for draft in (our_draft, their_draft))
            difference = Difference("no draft", prompt, position, ours_ids, theirs_ids, margin=None)
        if difference:
            found.append(difference)
    return num_compared, found


def compare_completions(
    reference: Sequence[Decoded], expected: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[Difference]:
    """Return the first difference of each completion from the expected one.

    Its margin is the target's, if the evaluator decoded the same tokens up to there.
    """
    found = []
    for prompt, (decoded, *both) in enumerate(zip(reference, expected, completions, strict=True)):
        ours, theirs = map(list, both)
        if ours == theirs:
            continue
        first = common_length(ours, theirs)
        # The evaluator's margins apply only while its completion has the same tokens.
        known = first < len(decoded.margins) and decoded.token_ids[:first] == theirs[:first]
        ended = first in (len(ours), len(theirs))
        margin = (decoded.margins[first], decoded.bounds[first]) if known and not ended else (None, 0.0)
        tokens = (ours[first : first + 1], theirs[first : first + 1])
        found.append(Difference("completion", prompt, first, *tokens, *margin))
    return found


def count_completions(differences: Sequence[Difference], num_completions: int) -> Counter[str]:
    """Return how many completions are identical, near-tie and different."""
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
    ours: PlacedDraft,
    theirs: PlacedDraft,
    margins: Sequence[tuple[float, float]],
    target_margins: Sequence[tuple[float, float]],
) -> Difference | None:
    """Return how two drafts differ: in their tokens or in how many were accepted; near-ties come last."""
    found = []
    position = ours.position
    num_same = common_length(ours.token_ids, theirs.token_ids)
    if ours.token_ids != theirs.token_ids:
        margin = _margin(margins, num_same)
        found.append(
            Difference("drafted tokens", prompt, position, ours.token_ids, theirs.token_ids, *margin)
        )
    decided = min(ours.num_accepted, theirs.num_accepted)
    if ours.num_accepted != theirs.num_accepted and decided < num_same:
        # Both drafted this token; one target accepted it and the other did not.
        margin = _margin(target_margins, position + decided)
        found.append(
            Difference("accepted", prompt, position, [ours.num_accepted], [theirs.num_accepted], *margin)
        )
    return next((one for one in found if not one.near_tie), found[0] if found else None)


def _margin(margins: Sequence[tuple[float, float]], index: int) -> tuple[float | None, float]:
    """Return a margin and its bound; None past the end, where one side stopped and the other did not."""
    return margins[index] if index < len(margins) else (None, 0.0)


def _without_near_ties(differences: Sequence[Difference]) -> list[Difference]:
    return [one for one in differences if not one.near_tie]


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return the counts of both sides, the differences and the verdict."""
    num_near, num_different = len(comparison.near_ties), len(comparison.differences)
    drafts = f"{comparison.num_equal} equal, {num_near} near-tie, {num_different} different"
    num = comparison.num_completions
    rows = [
        ["drafts compared", f"{comparison.num_compared}: {drafts}"],
        ["completions against vLLM without drafter", _completion_counts(comparison.plain_completions, num)],
        ["completions against the evaluator", _completion_counts(comparison.completions, num)],
    ]
    lines = [*_counts(comparison.ours, comparison.vllm), "", *aligned(rows, text_columns=2)]
    if comparison.exact:
        lines += _listed("drafts that differ", comparison.drafts)
        lines += _listed("completions that differ", [*comparison.plain_completions, *comparison.completions])
    lines += ["", _verdict(comparison.failures)]
    if not comparison.ours.num_accepted:
        lines.append("note: no drafted token was accepted, so this shows little; train the drafter first.")
    return lines


def _counts(ours: AcceptanceStats, vllm: AcceptanceStats) -> list[str]:
    sides = (ours, vllm)
    rows = [
        ["", "eagle31", "vLLM"],
        ["drafts", *(str(side.num_drafts) for side in sides)],
        ["acceptance length", *(f"{side.acceptance_length:.3f}" for side in sides)],
    ]
    for position in range(ours.k):
        rows.append(
            [
                f"accepted at position {position + 1}",
                *(str(side.accepted_per_position[position]) for side in sides),
            ]
        )
    return aligned(rows)


def _completion_counts(differences: Sequence[Difference], num_completions: int) -> str:
    counts = count_completions(differences, num_completions)
    return ", ".join(f"{counts[name]} {name}" for name in ("identical", "near-tie", "different"))


def _listed(title: str, differences: Sequence[Difference]) -> list[str]:
    """Return the first few differences; near-ties, which rounding explains, come last."""
    if not differences:
        return []
    ordered = sorted(differences, key=lambda one: one.near_tie)
    shown = [f"  {'near-tie' if one.near_tie else 'different'}: {one}" for one in ordered[:_NUM_SHOWN]]
    rest = len(ordered) - len(shown)
    return ["", f"{title}:", *shown, *([f"  and {rest} more (--json OUT writes all)"] if rest else [])]


def _verdict(failures: Sequence[str]) -> str:
    if not failures:
        return "verdict: vLLM serves what was trained"
    return f"verdict: vLLM does not serve what was trained: {'; '.join(failures)}"


def decode_reference(
    export: Path,
    parts: TargetParts,
    spec: TargetSpec,
    prompts: Sequence[Sequence[int]],
    device: torch.device,
    *,
    k: int,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> list[Decoded]:
    """Decode each prompt greedily with the drafter; keep drafts and margins."""
    loaded = load_export(export, device, dtype, target=target_defaults(parts))
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    frozen = FrozenParts(loaded.embed_tokens, parts.head.to(device), loaded.draft_target_ids, lm_head=None)
    model = load_target(spec, device)
    target = TargetDecoder(model, locate(model), loaded.drafter.config.aux_layer_ids)
    return [
        decode_speculatively(
            target,
            loaded.drafter,
            frozen,
            prompt,
            draft_tokens=k,
            max_new_tokens=max_new_tokens,
            eos_token_ids=stop_token_ids,
        )
        for prompt in tracked(prompts, "evaluator", "prompts")
    ]
