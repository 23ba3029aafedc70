"""Acceptance by replay, for each prompt and draft length."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.sampling import Sampling
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.replay import expected_replay, replay
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch
from eagle31.training.teacher_forced import acceptance_given_text, by_draft_length, greedy_hits
from train.evaluation.intervals import acceptance_interval

MAX_DRAFT_TOKENS = 8

# The rows of one document as `replay` takes them, and the draft length.
Rule = Callable[[Tensor, Tensor, int], AcceptanceStats]
Lengths = tuple[AcceptanceStats, ...]  # of one prompt, by draft length


@dataclass(frozen=True)
class PromptAcceptance:
    """The statistics of P prompts at some draft lengths, which are the same for all prompts."""

    by_prompt: tuple[Lengths, ...]
    # Of the token ids of all prompts and completions: results with the same one can be compared by prompt.
    texts_hash: str | None = None
    strata: tuple[int, ...] = ()  # how many of the prompts each source has; () is one source

    def totals(self) -> list[AcceptanceStats]:
        """Return the statistics over all prompts, by draft length."""
        return [sum(others, first) for first, *others in zip(*self.by_prompt, strict=True)]

    def counts(self) -> dict[str, list[list[float]]]:
        """Return `drafts` and `accepted`, each by draft length and prompt."""
        lengths = list(zip(*self.by_prompt, strict=True))
        return {
            "drafts": [[one.num_drafts for one in of_length] for of_length in lengths],
            "accepted": [[one.num_accepted for one in of_length] for of_length in lengths],
        }

    def to_json(self) -> dict[str, Any]:
        """Return the statistics at each draft length with 95 % intervals over prompts, and the counts.

        Lengths for which all completions are too short are left out.
        """
        counts = self.counts()
        rows = []
        for total, drafts, accepted in zip(self.totals(), *counts.values(), strict=True):
            if total.num_drafts:
                found = acceptance_interval(drafts, accepted, self.strata)
                rows.append(total.to_json() | {"low": found.low, "high": found.high})
        return {"by_draft_length": rows, "by_prompt": counts, "texts_hash": self.texts_hash}


def replay_greedily(
    drafter: Drafter,
    frozen: FrozenParts,
    rows: Iterable[PackedBatch],
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
) -> PromptAcceptance:
    """Replay greedy drafts of completions that the target wrote greedily."""
    return _replayed(drafter, frozen, rows, max_draft_tokens)["greedy_drafts"]


def sampling_report(
    drafter: Drafter,
    frozen: FrozenParts,
    rows: Iterable[PackedBatch],
    max_draft_tokens: int,
    sampling: Sampling,
    strata: tuple[int, ...] = (),
) -> dict[str, Any] | None:
    """Return `sampling` of evaluation.json: greedy drafts, and sampled ones, of the same completions.

    There are no sampled drafts where the target samples from a part of its distribution.

    Args:
        rows: completions that the target sampled in this way; without any the result is None.
        strata: see `PromptAcceptance`.
    """
    temperature = sampling.temperature if sampling.of_all_tokens else None
    found = _replayed(drafter, frozen, rows, max_draft_tokens, temperature)
    if not (num_prompts := len(found["greedy_drafts"].by_prompt)):
        return None
    settings = {"temperature": sampling.temperature, "settings": sampling.described}
    drafts = {name: replace(one, strata=strata).to_json() for name, one in found.items()}
    return settings | {"num_prompts": num_prompts} | drafts


@torch.no_grad()
def _replayed(
    drafter: Drafter,
    frozen: FrozenParts,
    rows: Iterable[PackedBatch],
    max_draft_tokens: int,
    temperature: float | None = None,
) -> dict[str, PromptAcceptance]:
    """Replay greedy drafts, and at a temperature sampled ones, of the same completions."""
    kinds: dict[str, tuple[Rule, Callable[..., tuple[Tensor, Tensor]]]]
    kinds = {"greedy_drafts": (replay, greedy_hits)}
    if temperature is not None:
        sampled = partial(acceptance_given_text, temperature=temperature)
        kinds["sampled_drafts"] = (expected_replay, sampled)
    found: dict[str, list[Lengths]] = {name: [] for name in kinds}
    texts = hashlib.sha256()
    for batch in rows:
        for name, (rule, compared) in kinds.items():
            drafts = partial(compared, drafter, frozen, batch)
            found[name] += _by_document(batch, rule, by_draft_length(drafter, max_draft_tokens, drafts))
        texts.update(_texts_of(batch))
    return {name: PromptAcceptance(tuple(one), texts.hexdigest()) for name, one in found.items()}


def _texts_of(batch: PackedBatch) -> bytes:
    """Return each document's token ids, and which of them the target wrote, as text."""
    documents = (batch.document_ids == index for index in range(int(batch.document_ids.max()) + 1))
    return "".join(
        f"{batch.input_ids[one].tolist()} {batch.loss_mask[one].int().tolist()}\n" for one in documents
    ).encode()


def _by_document(
    batch: PackedBatch, rule: Rule, by_length: Iterable[tuple[int, Tensor, Tensor]]
) -> list[Lengths]:
    """Return the statistics of each document in a row on the CPU, of what `by_draft_length` yields."""
    documents = [batch.document_ids == index for index in range(int(batch.document_ids.max()) + 1)]
    found = [
        [rule(compared[rows], supervised[rows], k) for rows in documents]
        for k, compared, supervised in by_length
    ]
    return list(zip(*found, strict=True))
