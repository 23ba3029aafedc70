"""Real speculative decoding: chain drafts of k tokens, verified by the target, both with key/value caches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    margins: list[float]  # the target's top logit minus its second, for each token
    drafts: list[list[int]] = field(default_factory=list)  # target ids; empty for plain decoding
    # Of each drafted token, the drafter's top logit minus its second; greedy decoding only.
    draft_margins: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Draft:
    """k drafted tokens."""

    token_ids: list[int]
    margins: list[float]  # top logit minus the second; empty when sampling
    probs: Tensor | None  # [k, V], what the tokens were drawn from; None for greedy drafts


def sampling_probs(logits: Tensor, temperature: float) -> Tensor:
    """float32 softmax(logits / temperature) over the last dimension."""
    return (logits.float() / temperature).softmax(dim=-1)


def top_margin(logits: Tensor) -> Tensor:
    """The largest logit minus the second: [..., V] -> float32 [...]."""
    if logits.shape[-1] == 1:
        return torch.full(logits.shape[:-1], torch.inf, device=logits.device)
    best, second = logits.float().topk(2).values.unbind(-1)
    return best - second


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
    ) -> Draft:
        """Takes the newly confirmed positions in and drafts behind the last of them.

        Args:
            aux_hidden_states: [n, A, Ht] of the new positions.
            next_token_ids: int64 [n], the token that follows each.
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
        margins: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(num_tokens):
            if step:
                token = torch.tensor([tokens[-1]], device=device)
                embeds = F.embedding(token, embed)
                output = self.drafter.next_step(state, embeds, positions[-1:] + step, spans, contexts)
            normed = self.drafter.norm(output)
            state = self.drafter.feed_back(output, normed)
            logits = self.lm_head(normed)[0]
            token_id, distribution = self._pick(logits, temperature, generator)
            tokens.append(token_id)
            if distribution is None:
                margins.append(top_margin(logits))
            else:
                probs.append(distribution)
        return Draft(
            tokens,
            torch.stack(margins).tolist() if margins else [],
            torch.stack(probs) if probs else None,
        )

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
