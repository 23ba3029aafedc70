"""Speculative decoding: drafts of k tokens, verified by the target, both with key/value caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.plain_attention import LayerKeys, attend_by_run, attention_weights, weighted_values
from eagle31.kernels.query_run import QueryRun
from eagle31.model.attention import NO_PRODUCTS
from eagle31.model.drafter import Drafter
from eagle31.model.dspark import DSparkDrafter
from eagle31.model.eagle import EagleDrafter
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
    sequence = new_sequence(drafter, frozen)
    target.start()
    logits, aux = target.forward(torch.tensor(prompt, device=device))
    first = int(logits[-1].argmax())
    completion, accepted = [first], []
    drafts: list[list[int]] = []
    following = torch.tensor([*prompt[1:], first], device=device)
    while len(completion) < max_new_tokens and completion[-1] not in eos_token_ids:
        draft = sequence.draft(aux, following, draft_tokens)
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


def new_sequence(drafter: Drafter, frozen: FrozenParts) -> "ChainDrafter | DSparkSequence":
    """Return what drafts for one sequence."""
    if isinstance(drafter, DSparkDrafter):
        return DSparkSequence(drafter, frozen)
    assert isinstance(drafter, EagleDrafter)
    return ChainDrafter(drafter, frozen)


class ChainDrafter:
    """Greedy drafts of a chain of tokens for one sequence, with a key/value cache.

    A drafted token's keys follow those of the confirmed positions in the cache, where the next confirmed
    positions overwrite them.
    """

    def __init__(self, drafter: EagleDrafter, frozen: FrozenParts) -> None:
        self.drafter = drafter
        self.frozen = frozen
        self.head = drafter.head(frozen.lm_head)
        self.keys: list[LayerKeys | None] = [None for _ in drafter.layers]  # by position
        self.num_rows = 0  # confirmed positions

    def draft(self, aux_hidden_states: Tensor, next_token_ids: Tensor, num_tokens: int) -> list[int]:
        """Add the newly confirmed positions to the cache, and return the target's ids of drafts after them.

        Args:
            aux_hidden_states: [n, A, Ht] of the new positions.
            next_token_ids: int64 [n], the token that follows each of them.
        """
        state = self.drafter.fuse(aux_hidden_states.to(self.frozen.embed_tokens.dtype))
        token_ids, start = next_token_ids, self.num_rows
        self.num_rows += len(next_token_ids)
        drafts: list[Tensor] = []  # they stay on the device until all are there
        for _ in range(num_tokens):
            normed, state = self.drafter.final_states(self._step(state, token_ids, start))
            token_ids = self.frozen.target_ids(F.linear(normed, self.head).argmax(-1))
            start = self.num_rows + len(drafts)
            drafts.append(token_ids)
        return torch.cat(drafts).tolist()

    def _step(self, state: Tensor, token_ids: Tensor, start: int) -> Tensor:
        """Run the layers at the positions from `start` on. [n, H], int64 [n] -> [1, H], the last one's."""
        rotation = self.drafter.rotary(torch.arange(start, start + len(state), device=state.device))
        tokens = F.embedding(token_ids, self.frozen.embed_tokens)
        layers = self.drafter.decoder_layers
        for index, layer in enumerate(layers):
            written = partial(self._written, index, start)
            read = slice(-1, None) if layer is layers[-1] else None
            state, _ = layer.step(state, tokens, rotation, written, self._attend, read)
        return state

    def _written(self, layer: int, start: int, keys: Tensor, values: Tensor) -> LayerKeys:
        """Write a layer's keys and values from `start` on, and return those of all positions up to them."""
        if (kept := self.keys[layer]) is not None:
            keys, values = torch.cat((kept.keys[:start], keys)), torch.cat((kept.values[:start], values))
        self.keys[layer] = found = LayerKeys(keys, values)
        return found

    def _attend(self, query: Tensor, keys: LayerKeys) -> Tensor:
        """Attend from the last positions, as many as there are queries, to those before them."""
        config, num_keys = self.drafter.config, len(keys.keys)
        run = QueryRun(0, len(query), 0, num_keys).within(config.sliding_window)
        if len(query) > 1:
            return attend_by_run(query, keys, (run,), config.attention_scale, config.sliding_window)
        # The heads that share a key are the rows of one product.
        grouped = query.view(1, keys.keys.shape[1], -1, query.shape[-1])
        visible = slice(run.key_start, num_keys)
        key, value = (part[visible].transpose(0, 1).unsqueeze(0) for part in (keys.keys, keys.values))
        attended = F.scaled_dot_product_attention(grouped, key, value, scale=config.attention_scale)
        return attended.reshape(1, query.shape[1], -1)


class DSparkSequence:
    """Greedy drafts of DSpark for one sequence, with a cache of the context's keys and values."""

    def __init__(self, drafter: DSparkDrafter, frozen: FrozenParts) -> None:
        self.drafter, self.frozen = drafter, frozen
        self.head = drafter.head(frozen.lm_head)
        self.keys: list[LayerKeys] = []
        self.num_rows = 0  # confirmed positions

    def draft(self, aux_hidden_states: Tensor, next_token_ids: Tensor, num_tokens: int) -> list[int]:
        """Add the newly confirmed positions to the context, and return the target's ids of drafts after them.

        The arguments are those of `ChainDrafter.draft`.
        """
        embed_tokens = self.frozen.embed_tokens
        fused = self.drafter.fuse(aux_hidden_states.to(embed_tokens.dtype))
        positions = torch.arange(self.num_rows, self.num_rows + len(fused), device=fused.device)
        self.num_rows += len(fused)
        found = self.drafter.step_keys(self.drafter.prefill(fused, NO_PRODUCTS, positions, attend_all))
        if self.keys:
            pairs = zip(self.keys, found, strict=True)
            found = [
                LayerKeys(torch.cat((kept.keys, new.keys)), torch.cat((kept.values, new.values)))
                for kept, new in pairs
            ]
        self.keys = found
        attend = partial(attend_all, scale=self.drafter.config.attention_scale)
        token = next_token_ids[-1:]
        (states,) = self.drafter.draft(token, positions[-1:] + 1, num_tokens, embed_tokens, found, attend)
        drafts: list[Tensor] = []
        for state in states.split(1):
            logits = F.linear(self.drafter.with_previous(state, token), self.head)
            token = self.frozen.target_ids(logits.argmax(-1))
            drafts.append(token)
        return torch.cat(drafts).tolist()


def attend_all(query: Tensor, keys: LayerKeys, scale: float = 1.0) -> Tensor:
    """Attend from the queries of one row, [1, Hq, D], to all keys."""
    weights = attention_weights(query, keys.keys, None, keys.rollout_keys, scale)
    return weighted_values(weights.to(query.dtype), keys.values, keys.rollout_values)
