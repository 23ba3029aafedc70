"""Drafting a chain of tokens with a key/value cache."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.model.attention import DocumentSpan
from eagle31.model.drafter import Drafter, LayerKeys
from eagle31.model.frozen import FrozenParts


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
