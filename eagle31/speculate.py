"""Real speculative decoding: chain drafts of k tokens, verified by the target, both with key/value caches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.acceptance import AcceptanceStats
from eagle31.attention import DocumentSpan
from eagle31.drafter import Drafter, LayerKeys
from eagle31.frozen import FrozenParts


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
    margins: list[float]  # plain decoding only: top logit minus the second, for each token


def sampling_probs(logits: Tensor, temperature: float) -> Tensor:
    """float32 softmax(logits / temperature) over the last dimension."""
    return (logits.float() / temperature).softmax(dim=-1)


def draw(probs: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(probs, 1, generator=generator))


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


class ChainDrafter:
    """Drafts for one sequence; its cache holds step-0 keys of the target's confirmed positions only."""

    def __init__(self, drafter: Drafter, frozen: FrozenParts) -> None:
        self.drafter = drafter
        self.frozen = frozen
        self.lm_head = frozen.lm_head or drafter.lm_head
        self.past: list[LayerKeys] | None = None
        self.num_rows = 0

    def draft(
        self,
        aux_hidden_states: Tensor,
        next_token_ids: Tensor,
        num_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> tuple[list[int], Tensor | None]:
        """Takes the newly confirmed positions in and drafts behind the last of them.

        Args:
            aux_hidden_states: [n, A, Ht] of the new positions.
            next_token_ids: int64 [n], the token that follows each.

        Returns:
            The drafted target ids, and for sampling their distributions [k, V].
        """
        device = next_token_ids.device
        num_new = next_token_ids.shape[0]
        positions = torch.arange(self.num_rows, self.num_rows + num_new, device=device)
        self.num_rows += num_new
        document_ids = torch.zeros(self.num_rows, dtype=torch.long, device=device)
        embed = self.frozen.embed_tokens
        output, contexts = self.drafter.first_step(
            self.drafter.fuse(aux_hidden_states.to(embed.dtype)),
            F.embedding(next_token_ids, embed),
            positions,
            document_ids,
            positions[-1:],
            self.past,
        )
        # The keys of later steps belong to drafts; the past keeps step 0 alone.
        self.past = [LayerKeys(context.keys, context.values) for context in contexts]
        spans, state = self._spans(), output
        tokens: list[int] = []
        probs: list[Tensor] = []
        for step in range(num_tokens):
            if step:
                token = torch.tensor([tokens[-1]], device=device)
                embeds = F.embedding(token, embed)
                output = self.drafter.next_step(state, embeds, positions[-1:] + step, spans, contexts)
            normed = self.drafter.norm(output)
            state = self.drafter.feed_back(output, normed)
            token_id, distribution = self._pick(self.lm_head(normed)[0], temperature, generator)
            tokens.append(token_id)
            if distribution is not None:
                probs.append(distribution)
        return tokens, torch.stack(probs) if probs else None

    def _spans(self) -> list[DocumentSpan]:
        visible = torch.ones(1, self.num_rows, dtype=torch.bool, device=self.frozen.embed_tokens.device)
        return [DocumentSpan(slice(0, 1), slice(0, self.num_rows), visible)]

    def _pick(
        self, logits: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[int, Tensor | None]:
        """logits: [Vd]. Returns a target id and, for sampling, the distribution over the target's ids [V]."""
        ids = self.frozen.draft_target_ids
        if temperature == 0.0:
            best = int(logits.argmax())
            return best if ids is None else int(ids[best]), None
        assert generator is not None
        probs = sampling_probs(logits, temperature)
        if ids is not None:
            probs = probs.new_zeros(self.frozen.embed_tokens.shape[0]).index_copy(0, ids, probs)
        return draw(probs, generator), probs


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
    following = torch.tensor([*prompt[1:], first], device=device)
    while len(text) < max_new_tokens and text[-1] not in eos_token_ids:
        drafts, draft_probs = chain.draft(aux, following, draft_tokens, temperature, generator)
        logits, aux = target.forward(torch.tensor([text[-1], *drafts], device=device))
        num_forwards += 1
        if temperature == 0.0:
            num_accepted, own = verify_greedy(drafts, logits)
        else:
            assert draft_probs is not None
            assert generator is not None
            probs = sampling_probs(logits, temperature)
            num_accepted, own = verify_sampled(drafts, draft_probs, probs, generator)
        kept = _cut([*drafts[:num_accepted], own], max_new_tokens - len(text), eos_token_ids)
        accepted.append(min(num_accepted, len(kept)))
        text += kept
        # The target keeps the token before the drafts and the accepted ones.
        target.rollback(len(prompt) + len(text) - 1)
        aux = aux[: num_accepted + 1]
        following = torch.tensor([*drafts[:num_accepted], own], device=device)
    return Decoded(text, accepted, num_forwards, time.perf_counter() - started, [])


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
        best, second = logits[-1].float().topk(2).values.tolist()
        margins.append(best - second)
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
