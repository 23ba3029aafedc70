"""Whether an engine drafts what the trained drafter drafts, and writes what the target does, on one text."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batches.rows import pack_row
from data.samples import CapturedSample
from eagle31.decoding.rounding import gaps_and_bounds
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.teacher_forced import logits_of_drafts
from train.evaluation.serving import PlacedDraft, Served, common_length

NOT_COMPARED = "not_compared"
_MISSING = "no draft"


@dataclass(frozen=True)
class Difference:
    """One difference between an engine and the reference, which is the trained drafter or the target."""

    what: str  # "drafted", "accepted", "no draft" or "written"
    position: int  # number of tokens of the completion before it
    expected: list[int]
    found: list[int]
    gap: float = math.inf  # by which the reference's largest logit exceeds that of the engine's token
    bound: float = 0.0  # the gap up to which rounding may decide

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.bound

    def __str__(self) -> str:
        gap = "" if math.isinf(self.gap) else f", logits {self.gap:.2g} apart, rounding {self.bound:.2g}"
        return f"position {self.position}: {self.what}: eagle31 {self.expected}, engine {self.found}{gap}"


@dataclass(frozen=True)
class Agreement:
    """What was compared of an engine's completions, and the differences, each with its prompt's index."""

    num_drafts: int  # all that the engine made
    num_compared: int
    drafts: list[tuple[int, Difference]]  # at most one per draft
    num_tokens: int  # of the completions
    tokens: list[tuple[int, Difference]]
    completions: dict[str, int]  # how many prompts have the same one without the drafter, by verdict

    @property
    def counts_of_drafts(self) -> dict[str, int]:
        return _counted(self.num_compared, self.drafts) | {
            f"num_{NOT_COMPARED}": self.num_drafts - self.num_compared
        }

    @property
    def counts_of_tokens(self) -> dict[str, int]:
        return _counted(self.num_tokens, self.tokens)


def compare_served(
    drafter: Drafter,
    frozen: FrozenParts,
    samples: Iterable[tuple[int, CapturedSample]],
    served: Served,
    dtype: torch.dtype,
    alone: Sequence[Sequence[int]] | None = None,
) -> Agreement:
    """Compare an engine's drafts and greedy completions with the trained drafter and the target.

    Args:
        samples: each prompt's index in `served`, and a sample of it; see `compare_drafts`.
        dtype: in which the engine computes.
        alone: the completions without the drafter. Each sample has one of these or of the engine's.
    """
    both = zip(served.completions, alone, strict=True) if alone is not None else ()
    verdicts = ["identical" if list(ours) == list(theirs) else NOT_COMPARED for ours, theirs in both]
    num_drafts = num_compared = num_tokens = 0
    drafts: list[tuple[int, Difference]] = []
    tokens: list[tuple[int, Difference]] = []
    for index, sample in samples:
        completion, made = served.completions[index], served.drafts[index]
        number, found = compare_drafts(drafter, frozen, sample, completion, made, dtype)
        num_drafts, num_compared = num_drafts + len(made), num_compared + number
        num_tokens += len(completion)
        drafts += [(index, one) for one in found]
        tokens += [(index, one) for one in compare_tokens(frozen, sample, completion, dtype)]
        if alone is not None and verdicts[index] == NOT_COMPARED:
            verdicts[index] = _verdict(frozen, sample, completion, alone[index], dtype)
    names = ("identical", "near_tie", "different", NOT_COMPARED)
    completions = {f"num_{name}": verdicts.count(name) for name in names}
    return Agreement(num_drafts, num_compared, drafts, num_tokens, tokens, completions)


def _verdict(
    frozen: FrozenParts,
    sample: CapturedSample,
    completion: Sequence[int],
    alone: Sequence[int],
    dtype: torch.dtype,
) -> str:
    """Return the verdict on a completion that is another one than without the drafter.

    At a near-tie the target's logits of the two tokens are so close that rounding decides between them. A
    store lacks the state at the prompt's end, and decodes it to zeros: then nobody knows.
    """
    parted = common_length(completion, alone)
    if parted in (len(completion), len(alone)):
        return "different"
    if not sample.final_hidden_states[int(sample.loss_mask.long().argmax()) - 1 + parted].any():
        return NOT_COMPARED
    written = [
        *compare_tokens(frozen, sample, completion, dtype),
        *compare_tokens(frozen, sample, alone, dtype),
    ]
    return "near_tie" if all(one.near_tie for one in written if one.position == parted) else "different"


@torch.no_grad()
def compare_drafts(
    drafter: Drafter,
    frozen: FrozenParts,
    sample: CapturedSample,
    completion: Sequence[int],
    drafts: Sequence[PlacedDraft],
    dtype: torch.dtype,
) -> tuple[int, list[Difference]]:
    """Compare an engine's drafts, token by token, with what the trained drafter drafts after the same tokens.

    A draft depends only on the tokens before it, so those of a completion are compared that begin while it is
    the sample's text. Every token of a draft is judged after the engine's tokens before it.

    Args:
        sample: the prompt with a completion, and the target's states.
        completion: what the engine wrote.
        drafts: in the order in which it made them, with the accepted tokens that are within the completion.
        dtype: in which the engine computes.

    Returns:
        The number of drafts that were compared, and at most one difference for each of them.
    """
    num_prompt_tokens = int(sample.loss_mask.long().argmax())
    common = common_length(sample.input_ids[num_prompt_tokens:].tolist(), completion)
    compared = [draft for draft in drafts if draft.position <= common]
    found = _misplaced(drafts, completion, common)
    if compared:
        found += _drafted(drafter, frozen, sample, num_prompt_tokens, compared, dtype)
    by_position: dict[int, Difference] = {}
    for one in sorted(found, key=lambda one: one.near_tie):  # those that are no near-ties come first
        by_position.setdefault(one.position, one)
    return len(compared), [by_position[position] for position in sorted(by_position)]


def compare_tokens(
    frozen: FrozenParts, sample: CapturedSample, completion: Sequence[int], dtype: torch.dtype
) -> list[Difference]:
    """Return where a completion is not what the target chooses after the tokens before.

    Tokens are compared as long as the completion is the sample's text, and the first one that is not.

    Args:
        dtype: in which the engine that wrote the completion computes.
    """
    num_prompt_tokens = int(sample.loss_mask.long().argmax())
    common = common_length(sample.input_ids[num_prompt_tokens:].tolist(), completion)
    ids = torch.tensor(completion[: common + 1])
    states = sample.final_hidden_states[num_prompt_tokens - 1 :][: len(ids)]
    with torch.no_grad():
        logits = frozen.target_head(states.to(frozen.embed_tokens.device)).cpu()
    gaps, bounds = gaps_and_bounds(logits, ids, dtype)
    judged = zip(ids.tolist(), logits.argmax(-1).tolist(), gaps.tolist(), bounds.tolist(), strict=True)
    return [
        Difference("written", position, [expected], [token], gap, bound)
        for position, (token, expected, gap, bound) in enumerate(judged)
        if not gap <= 0  # NaN: the reference has no answer
    ]


def _counted(num_compared: int, differences: Sequence[tuple[int, Difference]]) -> dict[str, int]:
    """Return how many of the compared are identical, near-ties and different, as a missing draft is."""
    num_near_tie = sum(one.near_tie for _, one in differences)
    return {
        "num_identical": num_compared - sum(one.what != _MISSING for _, one in differences),
        "num_near_tie": num_near_tie,
        "num_different": len(differences) - num_near_tie,
    }


def describe_counts(counts: dict[str, int]) -> str:
    """Return, in words, how many of the compared are identical, near-ties, different, or not compared."""
    parts = [f"{counts['num_identical']} of {sum(counts.values())} identical"]
    for name in ("near_tie", "different", NOT_COMPARED):
        if counts.get(f"num_{name}"):
            parts.append(f"{counts[f'num_{name}']} {name.replace('_', '-' if name == 'near_tie' else ' ')}")
    return ", ".join(parts)


def _misplaced(drafts: Sequence[PlacedDraft], completion: Sequence[int], common: int) -> list[Difference]:
    """Return where a draft is missing or has other accepted tokens than the leading ones that were written.

    A draft follows the accepted tokens of the one before and one more.
    """
    found, expected = [], 1
    for draft in drafts:
        if draft.position != expected and expected <= common:
            found.append(Difference(_MISSING, expected, [], draft.token_ids))
        right = common_length(draft.token_ids, completion[draft.position :])
        if draft.num_accepted != right and draft.position <= common:
            found.append(Difference("accepted", draft.position, [right], [draft.num_accepted]))
        expected = draft.position + draft.num_accepted + 1
    if expected < len(completion) and expected <= common:
        found.append(Difference(_MISSING, expected, [], []))
    return found


def _drafted(
    drafter: Drafter,
    frozen: FrozenParts,
    sample: CapturedSample,
    num_prompt_tokens: int,
    drafts: Sequence[PlacedDraft],
    dtype: torch.dtype,
) -> list[Difference]:
    """Return the drafts with a token that is not the drafter's, with the gap of the worst one."""
    batch = pack_row([sample], len(sample.input_ids))
    device = frozen.embed_tokens.device
    rows = torch.tensor([num_prompt_tokens + draft.position - 2 for draft in drafts], device=device)
    tokens = torch.tensor([draft.token_ids for draft in drafts], device=device)
    by_step = []
    draft_ids = _draft_ids(tokens, frozen)
    for step, logits in enumerate(logits_of_drafts(drafter, frozen, batch, rows, tokens)):
        by_step.append((logits.argmax(-1), *gaps_and_bounds(logits, draft_ids[:, step], dtype)))
    best, gaps, bounds = (torch.stack(one, dim=1) for one in zip(*by_step, strict=True))
    expected = frozen.target_ids(best)
    found = []
    for draft, ours, *judged in zip(drafts, expected.tolist(), gaps.tolist(), bounds.tolist(), strict=True):
        gap, bound = max(zip(*judged, strict=True), key=lambda one: (not one[0] <= one[1], one[0]))
        if not gap <= 0:
            found.append(Difference("drafted", draft.position, ours, draft.token_ids, gap, bound))
    return found


def _draft_ids(token_ids: Tensor, frozen: FrozenParts) -> Tensor:
    """Return the tokens' ids in the draft vocabulary, -1 for those that it lacks."""
    if frozen.draft_target_ids is None:
        return token_ids
    ids = frozen.draft_target_ids
    draft_ids = torch.full((len(frozen.embed_tokens),), -1, dtype=torch.int64, device=ids.device)
    draft_ids[ids] = torch.arange(len(ids), device=ids.device)
    return draft_ids[token_ids]
