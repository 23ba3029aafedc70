"""Speculative decoding: chain drafts of k tokens, verified by the target, both with key/value caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle31.decoding.chain import ChainDrafter
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
) -> Decoded:
    """Complete a prompt greedily by speculative decoding: as the target does, whatever is drafted.

    A draft that goes past the end of the completion is cut there, also in `accepted`.
    """
    device = frozen.embed_tokens.device
    chain = ChainDrafter(drafter, frozen)
    target.start()
    logits, aux = target.forward(torch.tensor(prompt, device=device))
    first = int(logits[-1].argmax())
    completion, accepted = [first], []
    drafts: list[list[int]] = []
    following = torch.tensor([*prompt[1:], first], device=device)
    while len(completion) < max_new_tokens and completion[-1] not in eos_token_ids:
        draft = chain.draft(aux, following, draft_tokens)
        logits, aux = target.forward(torch.tensor([completion[-1], *draft], device=device))
        greedy = logits.argmax(dim=-1).tolist()
        num_accepted = next((i for i, token in enumerate(draft) if token != greedy[i]), len(draft))
        emitted = greedy[: num_accepted + 1]
        kept = _cut(emitted, max_new_tokens - len(completion), eos_token_ids)
        accepted.append(min(num_accepted, len(kept)))
        drafts.append(draft)
        completion += kept
        # The target keeps the token before the drafts and the accepted ones.
        target.rollback(len(prompt) + len(completion) - 1)
        aux = aux[: num_accepted + 1]
        following = torch.tensor(emitted, device=device)
    return Decoded(completion, accepted, drafts)


def _cut(tokens: list[int], room: int, eos_token_ids: Sequence[int]) -> list[int]:
    """Return the tokens up to the first end token, and no more than `room`."""
    for position, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: min(position + 1, room)]
    return tokens[:room]
