"""Drafts of a chain of tokens with a key/value cache."""

from dataclasses import dataclass
from functools import partial
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.query_run import QueryRun
from eagle31.model.attention import Attend, LayerKeys, attend_by_run
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts

# How far two computations of the same margin may be apart, in units of the dtype's epsilon times the logits'
# magnitude. In 16 bits the rounded tensors decide: four logits, each off by one epsilon. Measured in bf16
# between one forward pass over a text and one for each token: at most 1.95 (embedded target, 2,207 tokens).
# In float32 the order of the sums decides: 12.9 were measured there, and engines differ more than that.
ROUNDING_UNITS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 128}


@dataclass(frozen=True)
class Draft:
    """A chain of k drafted tokens."""

    token_ids: list[int]
    margins: list[float]  # top logit minus the second; empty when sampling
    bounds: list[float]  # the margins up to which rounding may decide, see `rounding_bound`
    probs: Tensor | None  # [k, V], the distributions that the tokens were drawn from; None for greedy drafts


def sampling_probs(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature) over the last dimension in float32."""
    return (logits.float() / temperature).softmax(dim=-1)


def top_margin(logits: Tensor) -> Tensor:
    """Return the largest logit minus the second. [..., V] -> float32 [...]."""
    if logits.shape[-1] == 1:
        return torch.full(logits.shape[:-1], torch.inf, device=logits.device)
    best, second = logits.float().topk(2).values.unbind(-1)
    return best - second


def top_magnitude(logits: Tensor) -> Tensor:
    """Return the larger absolute value of the two largest logits. [..., V] -> float32 [...]."""
    return logits.float().topk(min(2, logits.shape[-1])).values.abs().amax(-1)


@overload
def rounding_bound(magnitude: float, dtype: torch.dtype) -> float: ...
@overload
def rounding_bound(magnitude: Tensor, dtype: torch.dtype) -> Tensor: ...
def rounding_bound(magnitude: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """Return the margin between two logits up to which rounding may decide which of them is larger.

    Args:
        magnitude: `top_magnitude` of the logits.
        dtype: in which the target computes.
    """
    return ROUNDING_UNITS.get(dtype, 4) * torch.finfo(dtype).eps * magnitude


def draw(probs: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(probs, 1, generator=generator))


class ChainDrafter:
    """Drafts for one sequence. The cache holds the step-0 keys of confirmed positions only."""

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
        """Add the newly confirmed positions to the cache and draft after the last of them.

        Args:
            aux_hidden_states: [n, A, Ht] of the new positions.
            next_token_ids: int64 [n], the token that follows each of them.
        """
        device = next_token_ids.device
        num_new = next_token_ids.shape[0]
        positions = torch.arange(self.num_rows, self.num_rows + num_new, device=device)
        self.num_rows += num_new
        embed, attend = self.frozen.embed_tokens, self._attend(1)
        output, keys = self.drafter.first_step(
            self.drafter.fuse(aux_hidden_states.to(embed.dtype)),
            F.embedding(next_token_ids, embed),
            positions,
            torch.tensor([num_new - 1], device=device),
            self._attend(num_new),
            attend,
            self.past,
        )
        # Later steps return new keys, which belong to this draft: the cache keeps step 0 alone.
        self.past = keys
        state = output
        tokens: list[int] = []
        margins: list[Tensor] = []
        bounds: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(num_tokens):
            if step:
                token = torch.tensor([tokens[-1]], device=device)
                embeds = F.embedding(token, embed)
                output, keys = self.drafter.next_step(state, embeds, positions[-1:] + step, attend, keys)
            normed = self.drafter.norm(output)
            state = self.drafter.feed_back(output, normed)
            logits = self.lm_head(normed)[0]
            token_id, distribution = self._pick(logits, temperature, generator)
            tokens.append(token_id)
            if distribution is None:
                margins.append(top_margin(logits))
                bounds.append(rounding_bound(top_magnitude(logits), aux_hidden_states.dtype))
            else:
                probs.append(distribution)
        found = torch.stack([torch.stack(margins), torch.stack(bounds)]).tolist() if margins else [[], []]
        return Draft(tokens, found[0], found[1], torch.stack(probs) if probs else None)

    def _attend(self, num_queries: int) -> Attend:
        """Return the attention of the last `num_queries` positions."""
        run = QueryRun(0, num_queries, 0, self.num_rows)
        config = self.drafter.config
        return partial(attend_by_run, runs=(run,), scale=config.attention_scale, window=config.sliding_window)

    def _pick(
        self, logits: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[int, Tensor | None]:
        """Return a target id and, when sampling, the distribution over the target's ids [V]. logits: [Vd]."""
        ids = self.frozen.draft_target_ids
        if temperature == 0.0:
            best = logits.argmax(-1, keepdim=True)  # indexing with a scalar would read it
            return int(best if ids is None else ids[best]), None
        assert generator is not None
        probs = sampling_probs(logits, temperature)
        if ids is not None:
            probs = probs.new_zeros(self.frozen.embed_tokens.shape[0]).index_copy(0, ids, probs)
        return draw(probs, generator), probs
