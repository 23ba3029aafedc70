"""Recursive rollouts: teacher-forced tokens, recursing hidden states."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from eagle31.kernels.merged_attention import CausalBlock, merged_attention
from eagle31.kernels.split_linear import TokenProjection
from eagle31.model.drafter import Drafter
from eagle31.training.attention_kernels import causal_blocks
from eagle31.training.batch import PackedBatch
from eagle31.training.schedule import RolloutSchedule, StepSchedule, schedule_rollout


def rollout(
    drafter: Drafter, embed_tokens: Tensor, batch: PackedBatch, rows: Tensor, num_steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rolls all of `rows` out over all the speculation steps, whatever counts.

    Args:
        embed_tokens: [V, H], the frozen embedding.
        rows: int64 [R], ascending.

    Yields:
        For each step the post-norm state that the head reads [R, H], and the state fed back [R, H].
    """
    chosen = torch.zeros(len(batch.input_ids), num_steps, dtype=torch.bool)
    chosen[rows.cpu()] = True
    schedule = schedule_rollout(chosen, batch.document_ids.cpu(), rows.device)
    yield from scheduled_rollout(drafter, embed_tokens, batch, schedule)


def scheduled_rollout(
    drafter: Drafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    schedule: RolloutSchedule,
    activation_checkpointing: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rolls the schedule's rows out.

    At step k row t has the embedding of x[t+1+k], RoPE position t+k, and predicts x[t+2+k]. Every step runs
    every module, also on no rows: sharded weights are gathered by all ranks together.

    Yields:
        For each step the post-norm state that the head reads [R_k, H], and the state fed back [R_k, H].

    Source: EAGLE-3 (arXiv 2503.01840) training-time test; arXiv 2605.09992 for the post-norm feedback.
    """
    keys_block, blocks = causal_blocks(schedule, drafter.config, embed_tokens)
    run = partial(checkpoint, use_reentrant=False) if activation_checkpointing else _call
    shared = _shared_products(drafter, embed_tokens, batch, schedule)
    output, contexts = run(
        _first_step, drafter, shared.first_shares(schedule), batch, schedule, keys_block, blocks[0]
    )
    state = output
    for step, (own, block) in enumerate(zip(schedule.steps, blocks, strict=True)):
        if step:
            if own.kept is not None:
                state = state[own.kept]
                contexts = [context.narrowed(own.kept) for context in contexts]
            position_ids = batch.position_ids[own.rows] + step
            output, rollout_keys = run(
                _later_step, drafter, shared.later_shares(own), position_ids, state, block, contexts
            )
            contexts = [a.extended(*b) for a, b in zip(contexts, rollout_keys, strict=True)]
        normed = drafter.norm(output)
        state = drafter.feed_back(output, normed)
        yield normed, state


class _Shares(NamedTuple):
    """The embedding's part in the first layer's projections of some rows."""

    query: TokenProjection
    key_value: tuple[TokenProjection, ...]


_NO_SHARES = (None, None)  # of the layers behind the first


class _SharedProducts(NamedTuple):
    """The same of all tokens, [U, out] each, of the projections that queries, keys and values start from.

    With one layer alone only rolled-out rows have queries, so there they are [J, out].
    """

    query: Tensor
    key_value: tuple[Tensor, ...]
    all_queries: bool

    def first_shares(self, schedule: RolloutSchedule) -> _Shares:
        """Of step 0: every key row has a key, and a query too where a layer comes behind."""
        return self._shares(schedule.key_token_index, schedule.steps[0].teacher_index)

    def later_shares(self, step: StepSchedule) -> _Shares:
        return self._shares(step.token_index, step.teacher_index)

    def _shares(self, token_index: Tensor, teacher_index: Tensor) -> _Shares:
        query = TokenProjection(self.query, token_index if self.all_queries else teacher_index)
        return _Shares(query, tuple(TokenProjection(products, token_index) for products in self.key_value))


def _shared_products(
    drafter: Drafter, embed_tokens: Tensor, batch: PackedBatch, schedule: RolloutSchedule
) -> _SharedProducts:
    layer, all_queries = drafter.decoder_layers[0], len(drafter.decoder_layers) > 1
    embeds = layer.input_layernorm(F.embedding(batch.input_ids[schedule.tokens], embed_tokens))
    attention = layer.self_attn
    key_value = tuple(projection(embeds) for projection in attention.key_value_inputs)
    if not all_queries:
        embeds = embeds[schedule.teacher_token_index]
    return _SharedProducts(attention.query_input(embeds), key_value, all_queries)


@dataclass(frozen=True)
class _Keys:
    """One layer's rotated keys and values: step 0 of the key rows, later steps of the rows there were."""

    keys: Tensor  # [S, Hkv, D]
    values: Tensor  # [S, Hkv, Dv]
    rollout_keys: tuple[Tensor, ...] = ()  # [R_i, Hkv, D] of steps 1..k
    rollout_values: tuple[Tensor, ...] = ()  # [R_i, Hkv, Dv]
    places: tuple[Tensor | None, ...] = ()  # of the present rows within each of these; None: the same rows

    def narrowed(self, kept: Tensor) -> "_Keys":
        """For some of the present rows."""
        return replace(self, places=tuple(kept if at is None else at[kept] for at in self.places))

    def extended(self, key: Tensor, value: Tensor) -> "_Keys":
        """With the keys and values of one more step."""
        return _Keys(
            self.keys,
            self.values,
            (*self.rollout_keys, key),
            (*self.rollout_values, value),
            (*self.places, None),
        )

    def attend(self, block: CausalBlock, query: Tensor) -> Tensor:
        return merged_attention(
            block, query, self.keys, self.values, self.rollout_keys, self.rollout_values, self.places
        )


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _first_step(
    drafter: Drafter,
    shares: _Shares,
    batch: PackedBatch,
    schedule: RolloutSchedule,
    keys_block: CausalBlock,
    block: CausalBlock,
) -> tuple[Tensor, list[_Keys]]:
    """Step 0: keys and values of the key rows. The last layer computes nothing else but of the queries.

    Layers before it feed its keys, so they are computed at every key row.
    """
    rows = schedule.key_rows
    hidden = drafter.fuse(batch.aux_hidden_states[rows])
    cos, sin = drafter.rotary(batch.position_ids[rows])
    contexts = []
    for layer in drafter.decoder_layers:
        last = layer is drafter.decoder_layers[-1]
        layer_input, residual = layer.state_input(hidden)
        query_share, key_shares = shares if layer.reads_embedding else _NO_SHARES
        context = _Keys(*layer.self_attn.key_value(layer_input, cos, sin, key_shares))
        contexts.append(context)
        if last:
            at = schedule.first_queries
            layer_input, residual, cos, sin = layer_input[at], residual[at], cos[at], sin[at]
        query = layer.self_attn.query(layer_input, cos, sin, query_share)
        hidden = layer.output(context.attend(block if last else keys_block, query), residual)
    return hidden, contexts


def _later_step(
    drafter: Drafter,
    shares: _Shares,
    position_ids: Tensor,
    state: Tensor,
    block: CausalBlock,
    contexts: list[_Keys],
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The decoder's output before the final norm, and each layer's keys and values of this step."""
    cos, sin = drafter.rotary(position_ids)
    own = []
    for layer, context in zip(drafter.decoder_layers, contexts, strict=True):
        layer_input, residual = layer.state_input(state)
        query_share, key_shares = shares if layer.reads_embedding else _NO_SHARES
        own.append(layer.self_attn.key_value(layer_input, cos, sin, key_shares))
        query = layer.self_attn.query(layer_input, cos, sin, query_share)
        state = layer.output(context.extended(*own[-1]).attend(block, query), residual)
    return state, own
