"""Recursive rollouts for training: tokens are teacher-forced, hidden states recurse."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from eagle31.kernels.merged_attention import CausalBlock, NoContext, merged_attention
from eagle31.kernels.packed_attention import PackedBlock, flash_obstacle, warn_once
from eagle31.kernels.query_run import context_window
from eagle31.kernels.split_linear import TokenProjection
from eagle31.kernels.tiled_attention import FlashKernel, Kernel, PlainKernel, TiledBlock, TileMasks
from eagle31.model.attention import Attend, LayerKeys
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.layer import LayerTokens
from eagle31.training.batch import PackedBatch
from eagle31.training.schedule import RolloutSchedule, StepSchedule, schedule_rollout


def rollout(
    drafter: Drafter, embed_tokens: Tensor, batch: PackedBatch, rows: Tensor, num_steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Roll all of `rows` out over all speculation steps, supervised or not.

    Args:
        embed_tokens: [V, H], the frozen embedding.
        rows: int64 [R], ascending.

    Yields:
        For each step the post-norm state that the head reads [R, H], and the state fed back [R, H].
    """
    chosen = torch.zeros(len(batch.input_ids), num_steps, dtype=torch.bool)
    chosen[rows.cpu()] = True
    schedule = schedule_rollout(chosen, batch.document_ids.cpu(), rows.device, drafter.config.key_reach)
    yield from scheduled_rollout(drafter, embed_tokens, batch, schedule)


def scheduled_rollout(
    drafter: Drafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    schedule: RolloutSchedule,
    activation_checkpointing: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Roll the scheduled rows out.

    At step k, row t has the embedding of x[t+1+k] and RoPE position t+k, and predicts x[t+2+k]. Every step
    calls every module, even when it has no rows, because all ranks gather sharded weights together.

    Yields:
        For each step the post-norm state that the head reads [R_k, H], and the state fed back [R_k, H].

    Source: EAGLE-3 (arXiv 2503.01840) training-time test; arXiv 2605.09992 for the post-norm feedback.
    """
    document_block, blocks = causal_blocks(schedule, drafter.config, embed_tokens)
    # Nothing is random, so no state of a generator is kept.
    checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    run = checkpointed if activation_checkpointing else _call
    attend = partial(_attend, window=drafter.config.sliding_window)
    products = _token_products(drafter, embed_tokens, batch, schedule)
    output, keys = run(
        _first_step,
        drafter,
        products.of_first_step(schedule),
        batch,
        schedule,
        attend(document_block),
        attend(blocks[0]),
    )
    state = output
    for step, (scheduled, block) in enumerate(zip(schedule.steps, blocks, strict=True)):
        if step:
            if scheduled.previous_index is not None:
                state = state[scheduled.previous_index]
                keys = [layer_keys.for_rows(scheduled.previous_index) for layer_keys in keys]
            position_ids = batch.position_ids[scheduled.rows] + step
            tokens = products.of_later_step(scheduled)
            output, keys = run(drafter.next_step, state, tokens, position_ids, attend(block), keys)
        normed = drafter.norm(output)
        state = drafter.feed_back(output, normed)
        yield normed, state


class _TokenProducts(NamedTuple):
    """The products [U, out] of all tokens with the projections of the first layer's attention.

    In a drafter with one layer only rolled-out rows have queries, so there the query's products are [J, out].
    """

    query: Tensor
    key_value: tuple[Tensor, ...]
    all_queries: bool

    def of_first_step(self, schedule: RolloutSchedule) -> LayerTokens:
        """Select those of step 0: every key row has a key, and a query too where another layer follows."""
        return self._of_rows(schedule.key_token_index, schedule.steps[0].teacher_index)

    def of_later_step(self, step: StepSchedule) -> LayerTokens:
        return self._of_rows(step.token_index, step.teacher_index)

    def _of_rows(self, token_index: Tensor, teacher_index: Tensor) -> LayerTokens:
        query = TokenProjection(self.query, token_index if self.all_queries else teacher_index)
        key_value = tuple(TokenProjection(products, token_index) for products in self.key_value)
        return LayerTokens(query, key_value)


def _token_products(
    drafter: Drafter, embed_tokens: Tensor, batch: PackedBatch, schedule: RolloutSchedule
) -> _TokenProducts:
    layer, all_queries = drafter.decoder_layers[0], len(drafter.decoder_layers) > 1
    embeds = layer.input_layernorm(F.embedding(batch.input_ids[schedule.tokens], embed_tokens))
    attention = layer.self_attn
    key_value = tuple(projection(embeds) for projection in attention.key_value_inputs)
    if not all_queries:
        embeds = embeds[schedule.teacher_token_index]
    return _TokenProducts(attention.query_input(embeds), key_value, all_queries)


def _first_step(
    drafter: Drafter,
    tokens: LayerTokens,
    batch: PackedBatch,
    schedule: RolloutSchedule,
    attend_rows: Attend,
    attend_queries: Attend,
) -> tuple[Tensor, list[LayerKeys]]:
    """Run step 0 at the key rows; the fusion is in here so that checkpointing recomputes it too."""
    rows = schedule.key_rows
    fused = drafter.fuse(batch.aux_hidden_states[rows])
    position_ids = batch.position_ids[rows]
    return drafter.first_step(fused, tokens, position_ids, schedule.query_index, attend_rows, attend_queries)


def _attend(block: CausalBlock, window: int | None) -> Attend:
    def attend(query: Tensor, keys: LayerKeys) -> Tensor:
        keys = keys.within(window)
        return merged_attention(
            block,
            query,
            keys.keys,
            keys.values,
            keys.rollout_keys,
            keys.rollout_values,
            keys.row_indices,
        )

    return attend


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def causal_blocks(
    schedule: RolloutSchedule, config: DrafterConfig, like: Tensor
) -> tuple[CausalBlock, list[CausalBlock]]:
    """Return the block of all key rows, for step 0 of layers before the last, and the block of each step.

    Args:
        like: a tensor of the queries' dtype and device.
    """
    scale = config.attention_scale
    longest = max((run.num_keys for run in schedule.document_runs), default=0)
    windows = [_effective(config.sliding_window, step, longest) for step in range(len(schedule.steps))]
    on_gpu = like.device.type == "cuda"
    obstacle = flash_obstacle(like.device, like.dtype, config.head_dim) if on_gpu else None
    if on_gpu and obstacle is None:
        first = PackedBlock(schedule.steps[0].runs, like.device, scale)
        every = PackedBlock(schedule.document_runs, like.device, scale)
        return every.for_rows(None, windows[0]), [
            NoContext(scale) if window == 0 else first.for_rows(step.first_index, window)
            for step, window in zip(schedule.steps, windows, strict=True)
        ]
    if obstacle is not None:
        warn_once(like.device, obstacle)
    masks = {window: TileMasks.for_keys(longest, like, window) for window in set(windows) if window != 0}
    # The CPU's flash kernel has one width for keys and values, and is the slower one with padded values.
    narrow = config.value_width < config.head_dim
    kernel: Kernel = PlainKernel(scale) if on_gpu or narrow else FlashKernel(scale)
    return TiledBlock(schedule.document_runs, masks[windows[0]], kernel), [
        NoContext(scale) if window == 0 else TiledBlock(step.runs, masks[window], kernel)
        for step, window in zip(schedule.steps, windows, strict=True)
    ]


def _effective(window: int | None, step: int, longest: int) -> int | None:
    """Return the window of a step, or None where no query has as many keys."""
    context = context_window(window, step)
    return None if context is None or context >= longest else context
