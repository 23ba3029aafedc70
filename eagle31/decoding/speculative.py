"""Real speculative decoding: chain drafts of k tokens, verified by the target, both with key/value caches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.chain import ChainDrafter, draw, sampling_probs, top_margin
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts


class CachedTarget(Protocol):
    """A target that decodes one sequence with a key/value cache."""

    def start(self) -> None:
        """Forgets the sequence."""

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Appends int64 [n]; returns logits [n, V] and aux hidden states [n, A, Ht]."""

    def rollback(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` of the sequence."""


@dataclass(frozen=True)
class Decoded:
    """One prompt's continuation."""

    token_ids: list[int]
    accepted: list[int]  # tokens accepted of each draft; empty for plain decoding
    num_target_forwards: int
    seconds: float
    margins: list[float]  # the target's top logit minus its second, for each token
    drafts: list[list[int]] = field(default_factory=list)  # target ids; empty for plain decoding
    # Of each drafted token, the drafter's top logit minus its second; greedy decoding only.
    draft_margins: list[list[float]] = field(default_factory=list)


def verify_greedy(drafts: Sequence[int], logits: Tensor) -> tuple[int, int]:
    """Leading drafts equal to the target's greedy tokens, and the target's own token behind them.

    logits: [k+1, V], of the token before the drafts and of each draft.
    """
    greedy = logits.argmax(dim=-1).tolist()
    for position, token in enumerate(drafts):
        if token != greedy[position]:
            return position, greedy[position]
    return len(drafts), greedy[len(drafts)]


def verify_sampled(
    drafts: Sequence[int], draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """Rejection sampling: the emitted tokens are distributed as the target's own.

    Args:
        draft_probs: [k, V], the distributions that the drafts were drawn from.
        target_probs: [k+1, V].

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    for position, token in enumerate(drafts):
        p, q = target_probs[position, token], draft_probs[position, token]
        if torch.rand((), generator=generator) * q < p:
            continue
        rest = (target_probs[position] - draft_probs[position]).clamp(min=0)
        return position, draw(rest / rest.sum(), generator)
    return len(drafts), draw(target_probs[len(drafts)], generator)


@torch.inference_mode()
def decode_speculatively(
    target: CachedTarget,
    drafter: Drafter,
    frozen: FrozenParts,
    prompt: Sequence[int],
    *,
    draft_tokens: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Continues a prompt; the text is the target's own whatever the drafter proposes.

    A draft that runs past the end of the text is cut there: `accepted` counts what lies inside.
    """
    started = time.perf_counter()
    device = frozen.embed_tokens.device
    chain = ChainDrafter(drafter, frozen)
    target.start()
    logits, aux = target.forward(torch.tensor(prompt, device=device))
    first = _choose(logits[-1], temperature, generator)
    text, accepted, num_forwards = [first], [], 1
    margins = [float(top_margin(logits[-1]))]
    drafts: list[list[int]] = []
    draft_margins: list[list[float]] = []
    following = torch.tensor([*prompt[1:], first], device=device)
    while len(text) < max_new_tokens and text[-1] not in eos_token_ids:
        draft = chain.draft(aux, following, draft_tokens, temperature, generator)
        logits, aux = target.forward(torch.tensor([text[-1], *draft.token_ids], device=device))
        num_forwards += 1
        if temperature == 0.0:
            num_accepted, own = verify_greedy(draft.token_ids, logits)
        else:
            assert draft.probs is not None
            assert generator is not None
            probs = sampling_probs(logits, temperature)
            num_accepted, own = verify_sampled(draft.token_ids, draft.probs, probs, generator)
        emitted = [*draft.token_ids[:num_accepted], own]
        kept = _cut(emitted, max_new_tokens - len(text), eos_token_ids)
        accepted.append(min(num_accepted, len(kept)))
        drafts.append(draft.token_ids)
        draft_margins.append(draft.margins)
        margins += top_margin(logits[: len(kept)]).tolist()
        text += kept
        # The target keeps the token before the drafts and the accepted ones.
        target.rollback(len(prompt) + len(text) - 1)
        aux = aux[: num_accepted + 1]
        following = torch.tensor(emitted, device=device)
    seconds = time.perf_counter() - started
    return Decoded(text, accepted, num_forwards, seconds, margins, drafts, draft_margins)


@torch.inference_mode()
def decode_plainly(
    target: CachedTarget,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    device: torch.device,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Decoded:
    """The target alone, one token a forward."""
    started = time.perf_counter()
    target.start()
    text: list[int] = []
    margins: list[float] = []
    inputs = torch.tensor(prompt, device=device)
    while len(text) < max_new_tokens and (not text or text[-1] not in eos_token_ids):
        logits, _ = target.forward(inputs)
        margins.append(float(top_margin(logits[-1])))
        text.append(_choose(logits[-1], temperature, generator))
        inputs = torch.tensor(text[-1:], device=device)
    return Decoded(text, [], len(text), time.perf_counter() - started, margins)


def acceptance(decoded: Sequence[Decoded], draft_tokens: int) -> AcceptanceStats:
    """Over all drafts of all prompts."""
    return AcceptanceStats.from_lengths(draft_tokens, [n for one in decoded for n in one.accepted])


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    assert generator is not None
    return draw(sampling_probs(logits, temperature), generator)


def _cut(tokens: list[int], room: int, eos_token_ids: Sequence[int]) -> list[int]:
    """Up to the first end token, and no more than fit."""
    for position, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: min(position + 1, room)]
    return tokens[:room]
