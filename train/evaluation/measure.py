"""One evaluation of a drafter, for the evaluate stage and scripts/evaluate."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data.progress import tracked
from data.samples import CapturedSample
from data.target.cached_decoding import TargetDecoder
from data.target.head import TargetHead
from data.target.parts import TargetParts
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.speculative import decode_speculatively
from eagle31.export.read import LoadedExport
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from train.evaluation.agreement import compare_served
from train.evaluation.completing import CompletingTarget
from train.evaluation.replay import MAX_DRAFT_TOKENS
from train.evaluation.serving import Served, placed_drafts

Candidate = tuple[Drafter, FrozenParts]
Samples = Iterable[tuple[int, CapturedSample]]  # the prompt's place among those that were decoded


def candidate_of(
    loaded: LoadedExport, head: TargetHead, device: torch.device, dtype: torch.dtype
) -> Candidate:
    """Return a drafter with the frozen parts that it drafts with, where and in which it computes."""
    ids = loaded.draft_target_ids
    frozen = FrozenParts(
        loaded.embed_tokens.to(device, dtype),
        head.to(device),
        None if ids is None else ids.to(device),
        lm_head=None,
    )
    return loaded.drafter.to(device, dtype), frozen


@dataclass(frozen=True)
class Conditions:
    """How a drafter is measured."""

    draft_tokens: int
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]

    @property
    def longest_draft(self) -> int:
        """The longest draft that is replayed."""
        return max(MAX_DRAFT_TOKENS, self.draft_tokens)


@dataclass(frozen=True)
class DecodedSubset:
    """What an engine decoded with the drafter: some of the prompts."""

    engine: str
    indices: Sequence[int]  # of the prompts
    served: Served
    dtype: torch.dtype  # in which the target computes


def decode_in_transformers(
    target: CompletingTarget,
    candidate: Candidate,
    prompts: Sequence[Sequence[int]],
    chosen: Sequence[int],
    conditions: Conditions,
) -> tuple[DecodedSubset, Samples]:
    """Decode the chosen prompts with eagle31's decoder.

    Args:
        chosen: indices of prompts.
    """
    capture = target.capture
    decoder = TargetDecoder(capture.model, capture.modules, capture.aux_layer_ids)
    limits: dict[str, Any] = {"max_new_tokens": conditions.max_new_tokens}
    limits |= {"draft_tokens": conditions.draft_tokens, "eos_token_ids": conditions.eos_token_ids}
    decoded = [
        decode_speculatively(decoder, *candidate, prompts[index], **limits)
        for index in tracked(chosen, "decoding", "prompts")
    ]
    served = Served([one.token_ids for one in decoded], [placed_drafts(one) for one in decoded])
    engine = f"eagle31 (transformers, {str(capture.dtype).removeprefix('torch.')}, {decoder.device.type})"
    samples = list(target.samples([prompts[index] for index in chosen], served.completions))
    return DecodedSubset(engine, chosen, served, capture.dtype), samples


def without_vllm(parts: TargetParts) -> dict[str, Any] | None:
    """Return `mtp` of evaluation.json where transformers decodes; None if the target has no MTP head."""
    if not parts.has_mtp_head:
        return None
    return {"missing": "not measured: transformers does not draft with it, and target.engine=vllm does."}


def evaluation_json(
    conditions: Conditions,
    candidate: Candidate,
    num_prompts: int,
    replayed: Mapping[str, dict[str, Any] | None],
    sampled: dict[str, Any] | None,
    mtp: dict[str, Any] | None,
    decoded: DecodedSubset,
    samples: Samples,
    alone: Sequence[Sequence[int]],
    states: str,
) -> dict[str, Any]:
    """Return the content of evaluation.json.

    Args:
        replayed: acceptance by drafter, "trained" and "untrained".
        sampled: acceptance of drafts of sampled completions; None without any.
        mtp: acceptance of drafts by the target's own MTP head, or why it is `missing`; None if it has none.
        samples: of the decoded prompts; see `compare_served`.
        alone: the target's greedy completions of all prompts.
        states: how the states that were replayed were captured, for messages.
    """
    k, served = conditions.draft_tokens, decoded.served
    without = [alone[index] for index in decoded.indices]
    agreement = compare_served(*candidate, samples, served, decoded.dtype, without)
    return {
        "k": k,
        "max_new_tokens": conditions.max_new_tokens,
        "num_prompts": num_prompts,
        "engine": decoded.engine,
        "states": states,
        **replayed,
        "mtp": mtp,
        "sampling": sampled,
        "decoding": {
            "num_prompts": len(served.completions),
            **sum(served.acceptance(k), AcceptanceStats.from_lengths(k, [])).to_json(),
            "num_tokens": sum(map(len, served.completions)),
            "completions": agreement.completions,
            "replay": agreement.counts_of_drafts,
        },
    }


def common_positions(parts: TargetParts, drafter: DrafterConfig) -> int:
    """Return the number of positions that target and drafter both have."""
    target = getattr(parts.config.get_text_config(), "max_position_embeddings", None)
    return min(target or drafter.max_position_embeddings, drafter.max_position_embeddings)
