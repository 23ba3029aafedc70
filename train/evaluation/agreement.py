"""Whether decoding did what replay says, draft by draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data.batches.rows import pack_row
from data.samples import CapturedSample
from eagle31.decoding.chain import rounding_bound, top_magnitude, top_margin
from eagle31.decoding.replay import replayed_drafts
from eagle31.decoding.speculative import Decoded
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.teacher_forced import greedy_hits, logits_of_draft
from train.engines.serving import PlacedDraft, common_length, placed_drafts


@dataclass(frozen=True)
class DraftedCompletion:
    """One prompt's greedy completion, and the drafts that led to it."""

    token_ids: Sequence[int]
    drafts: Sequence[PlacedDraft]
    # For each token the target's top logit minus its second, and the value up to which rounding may decide;
    # empty where the engine does not return them.
    margins: Sequence[tuple[float, float]] = ()

    @staticmethod
    def of(decoded: Decoded) -> "DraftedCompletion":
        margins = list(zip(decoded.margins, decoded.bounds, strict=True))
        return DraftedCompletion(decoded.token_ids, placed_drafts(decoded), margins)


@dataclass(frozen=True)
class DecodedSubset:
    """What an engine decoded: some of the test prompts."""

    engine: str
    report: dict[str, Any]  # `decoding` of evaluation.json, without its comparison with replay
    sampling: dict[str, Any] | None  # `sampling` of evaluation.json
    indices: Sequence[int]  # of the prompts
    completions: Sequence[DraftedCompletion]  # with the drafter, greedy
    dtype: torch.dtype  # in which the target computes


@torch.no_grad()
def replay_verdict(
    drafter: Drafter,
    frozen: FrozenParts,
    sample: CapturedSample,
    decoded: DraftedCompletion,
    draft_tokens: int,
    dtype: torch.dtype,
) -> str:
    """Return "identical" if replay has the same drafts with as many accepted tokens as decoding had.

    At the first difference a token was accepted by one of the two only. It is a "near_tie" if rounding may
    decide it: of the drafter, where its two top logits are that close; of the target, where its completions
    part there. Otherwise the two are "different".

    Args:
        sample: the prompt with the target's greedy completion, which replay reads.
        dtype: in which the target decodes.
    """
    batch = pack_row([sample], len(sample.input_ids)).to(
        frozen.embed_tokens.device, frozen.embed_tokens.dtype
    )
    hits, supervised = greedy_hits(drafter, frozen, batch, draft_tokens)
    num_prompt_tokens = int(sample.loss_mask.long().argmax())
    text = sample.input_ids[num_prompt_tokens:].tolist()
    parted = common_length(text, decoded.token_ids)
    drafts = {draft.position: draft for draft in decoded.drafts}
    num_compared = 0
    for row, num_accepted in replayed_drafts(hits, supervised, draft_tokens):
        position = row + 2 - num_prompt_tokens
        if position >= parted:
            break
        draft = drafts.get(position)
        if draft is None:
            return "different"
        if draft.num_accepted != num_accepted:
            step = min(draft.num_accepted, num_accepted)
            if position + step >= parted:
                break
            logits = logits_of_draft(drafter, frozen, batch, row, step)
            return _judged(*_margin(logits, dtype))
        num_compared += 1
    if parted == len(text) == len(decoded.token_ids):
        return "identical" if num_compared == len(drafts) else "different"
    if parted in (len(text), len(decoded.token_ids)):
        return "different"
    if decoded.margins:
        return _judged(*decoded.margins[parted])
    if parted == 0:  # the state at the prompt's last token is not kept
        return "different"
    state = batch.final_hidden_states[num_prompt_tokens + parted - 1]
    return _judged(*_margin(frozen.target_head(state), dtype))


def _margin(logits: torch.Tensor, dtype: torch.dtype) -> tuple[float, float]:
    return float(top_margin(logits)), rounding_bound(float(top_magnitude(logits)), dtype)


def _judged(margin: float, bound: float) -> str:
    return "near_tie" if margin <= bound else "different"
