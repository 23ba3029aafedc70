"""Speculative decoding: chain drafts of k tokens, verified by the target, both with key/value caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle31.decoding.chain import ChainDrafter, draw, sampling_probs
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts


class CachedTarget(Protocol):
    """A target that decodes one sequence with a key/value cache."""

    def start(self) -> None:
        """Start a new sequence."""

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens, int64 [n], and return logits [n, V] and aux hidden states [n, A, Ht]."""

    def rollback(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` of the sequence."""


@dataclass(frozen=True)
class Decoded:
    """The completion of one prompt."""

    token_ids: list[int]
    accepted: list[int]  # tokens of each draft, within the completion
    drafts: list[list[int]]  # target ids


def verify_greedy(drafts: Sequence[int], logits: Tensor) -> tuple[int, int]:
    """Return the number of leading drafts that are the target's greedy tokens, and the next target token.

    logits: [k+1, V], at the token before the drafts and at each draft.
    """
    greedy = logits.argmax(dim=-1).tolist()
    for position, token in enumerate(drafts):
        if token != greedy[position]:
            return position, greedy[position]
    return len(drafts), greedy[len(drafts)]


def verify_sampled(
    drafts: Sequence[int], draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """Return the number of accepted drafts and the next token by rejection sampling.

    The emitted tokens have the target's distribution.

    Args:
        draft_probs: [k, V], the distributions that the drafts were drawn from.
        target_probs: [k+1, V].

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    for position, token in enumerate(drafts):
        p, q = target_probs[position, token], draft_probs[position, token]
        if torch.rand((), generator=generator, device=generator.device) * q < p:
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
    """Complete a prompt by speculative decoding. The completion is the target's, whatever is drafted.

    A draft that goes past the end of the completion is cut there, also in `accepted`.
    """
    device = frozen.embed_tokens.device
    chain = ChainDrafter(drafter, frozen)
    target.start()
    logits, aux = target.forward(torch.tensor(prompt, device=device))
    first = _choose(logits[-1], temperature, generator)
    completion, accepted = [first], []
    drafts: list[list[int]] = []
    following = torch.tensor([*prompt[1:], first], device=device)
    while len(completion) < max_new_tokens and completion[-1] not in eos_token_ids:
        draft = chain.draft(aux, following, draft_tokens, temperature, generator)
        logits, aux = target.forward(torch.tensor([completion[-1], *draft.token_ids], device=device))
        if temperature == 0.0:
            num_accepted, next_token = verify_greedy(draft.token_ids, logits)
        else:
            assert draft.probs is not None
            assert generator is not None
            probs = sampling_probs(logits, temperature)
            num_accepted, next_token = verify_sampled(draft.token_ids, draft.probs, probs, generator)
        emitted = [*draft.token_ids[:num_accepted], next_token]
        kept = _cut(emitted, max_new_tokens - len(completion), eos_token_ids)
        accepted.append(min(num_accepted, len(kept)))
        drafts.append(draft.token_ids)
        completion += kept
        # The target keeps the token before the drafts and the accepted ones.
        target.rollback(len(prompt) + len(completion) - 1)
        aux = aux[: num_accepted + 1]
        following = torch.tensor(emitted, device=device)
    return Decoded(completion, accepted, drafts)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    assert generator is not None
    return draw(sampling_probs(logits, temperature), generator)


def _cut(tokens: list[int], room: int, eos_token_ids: Sequence[int]) -> list[int]:
    """Return the tokens up to the first end token, and no more than `room`."""
    for position, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: min(position + 1, room)]
    return tokens[:room]
