"""The FLOPs of one training step, by formula.

A multiplication and an addition are two FLOPs. The formula counts the matrix products of the rows that are
computed, and attention's scores and sums over visible pairs. It leaves out recomputed activations and
elementwise operations, so a utilisation computed from it leaves them out too.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from eagle31.kernels.query_run import context_window, document_starts
from eagle31.model.config import DrafterConfig, DSparkShape
from eagle31.model.shapes import MlaShape, NormedGqaShape
from eagle31.training.batch import PackedBatch, sampled, step_rows, supervised_drafts
from eagle31.training.schedule import DraftCosts, needed_key_rows, teacher_rows


@dataclass(frozen=True)
class StepCounts:
    """The number of rows and pairs that each part of a training step computes."""

    keys: int  # rows with a step-0 key and value
    rows: tuple[int, ...]  # rolled-out rows by speculation step; the head reads the same rows
    causal_pairs: int  # visible (row, step-0 key) pairs over all steps
    teachers: int  # positions of the target's distribution

    @property
    def rolled_out(self) -> int:
        """Return the number of rolled-out rows over all steps."""
        return sum(self.rows)

    def rollout_pairs(self, window: int | None) -> int:
        """Return the number of (row, rollout key) pairs over all steps; a row of step k reads k of them."""
        most = len(self.rows) if window is None else window
        return sum(min(step, most) * rows for step, rows in enumerate(self.rows))


@dataclass(frozen=True)
class StepFlops:
    """FLOPs by part, of forward and backward together."""

    fusion: int
    projections: int  # q, k, v, o
    mlp: int
    attention: int
    head: int
    teacher: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def count_step(
    batch: PackedBatch, num_steps: int, config: DrafterConfig, max_drafts: int | None = None
) -> StepCounts:
    """Count what a step on this packed row computes.

    Keys are computed from each document's start to its last supervised row, of those that the window reaches.
    A row is rolled out as long as its steps are supervised.

    Args:
        max_drafts: of `schedule_batch`.
    """
    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, num_steps)
    supervised, _ = sampled(supervised, max_drafts)
    rows = step_rows(supervised)
    depth = torch.arange(len(batch.input_ids)) - document_starts(batch.document_ids) + 1
    pairs = 0
    for step, of_step in enumerate(rows):
        context = context_window(config.sliding_window, step)
        read = depth[of_step]
        pairs += int((read if context is None else read.clamp(max=context)).sum())
    return StepCounts(
        keys=len(needed_key_rows(rows[0], batch.document_ids, config.key_reach)),
        rows=tuple(map(len, rows)),
        causal_pairs=pairs,
        teachers=len(teacher_rows(rows)),
    )


def typical_counts(
    row_tokens: int,
    num_steps: int,
    document_tokens: int,
    assistant_fraction: float,
    config: DrafterConfig,
    max_drafts: int | None = None,
) -> StepCounts:
    """Estimate the counts of a packed row before there is any data.

    Every document is `document_tokens` long and ends with one answer, whose length is `assistant_fraction` of
    the document's.

    Args:
        max_drafts: of `schedule_batch`.
    """
    length = min(document_tokens, row_tokens)
    index = torch.arange(length)
    written = index >= length - max(1, round(assistant_fraction * length))
    none = index.new_empty(length, 0)
    document = PackedBatch(index, written, torch.zeros_like(index), index, none, none)
    one = count_step(document, num_steps, config)
    documents = row_tokens / length
    kept = documents if max_drafts is None else min(documents, max_drafts / max(one.rows[0], 1))
    return StepCounts(
        keys=round(documents * one.keys),
        rows=tuple(round(kept * rows) for rows in one.rows),
        causal_pairs=round(kept * one.causal_pairs),
        teachers=round(kept * one.teachers),
    )


def step_flops(config: DrafterConfig, counts: StepCounts, head_trained: bool) -> StepFlops:
    """Return the FLOPs of forward and backward.

    A trained matrix costs its product three times: forward, gradient of the input, gradient of the weight. A
    frozen head does not need the last one. The teacher has no backward; it is computed over the draft
    vocabulary, as in a step without metrics. The few teachers that two chunks of chains both compute are not
    counted. The embedding's half of the query, key and value projections is computed once per token, however
    many steps read it, and once more for the keys of step 0. Layers before the last compute every key row at
    step 0.
    """
    if config.dspark is not None:
        return _dspark_flops(config, config.dspark, counts)
    hidden, target, rolled_out = config.hidden_size, config.target_hidden_size, counts.rolled_out
    # Without the norms before it, fc's input needs no gradient.
    fusion = (6 if config.fc_norm else 4) * counts.keys * len(config.aux_layer_ids) * target * hidden
    wider = counts.rolled_out - counts.rows[0] + counts.keys  # (row, step) pairs of a layer before the last
    rollout_pairs = counts.rollout_pairs(config.sliding_window)
    projections = mlp = attention = 0
    for layer in range(config.num_hidden_layers):
        last = layer == config.num_hidden_layers - 1
        computed = rolled_out if last else wider
        projections += _projections(config, counts, computed, layer == 0, last)
        mlp += 6 * computed * 3 * hidden * config.intermediate_size
        # Scores and weighted sum in forward, four gradients in backward.
        heads = config.num_attention_heads * (config.head_dim + config.value_width)
        attention += 6 * (counts.causal_pairs + rollout_pairs) * heads
    return StepFlops(
        fusion=fusion,
        projections=projections,
        mlp=mlp,
        attention=attention,
        head=(6 if head_trained else 4) * rolled_out * hidden * config.draft_vocab_size,
        teacher=2 * counts.teachers * target * config.draft_vocab_size,
    )


def _dspark_flops(config: DrafterConfig, dspark: DSparkShape, counts: StepCounts) -> StepFlops:
    """Return the FLOPs of DSpark's step.

    Every row that is rolled out has a query for each step. The Markov head is a part of the head's matrix,
    whose gradient is computed as a whole, also where the draft head is frozen.
    """
    hidden, target, layers = config.hidden_size, config.target_hidden_size, config.num_hidden_layers
    of_row = dspark.num_queries(len(counts.rows))
    queries = counts.rows[0] * of_row
    context_pairs = counts.causal_pairs * queries // max(counts.rolled_out, 1)
    of, heads = attention_projections(config), config.num_attention_heads
    keys = (counts.keys + queries) * of.key_width
    widths = heads * (config.head_dim + config.value_width)
    return StepFlops(
        fusion=4 * counts.keys * len(config.aux_layer_ids) * target * hidden,
        projections=6 * layers * hidden * (keys + queries * (of.query_width + heads * config.value_width)),
        mlp=6 * layers * queries * 3 * hidden * config.intermediate_size,
        attention=6 * layers * (context_pairs + queries * of_row) * widths,
        head=6 * counts.rolled_out * (hidden + dspark.markov_rank) * config.draft_vocab_size,
        teacher=2 * counts.teachers * target * config.draft_vocab_size,
    )


def sample_flops(config: DrafterConfig, num_steps: int, supervision: Tensor, head_trained: bool) -> Tensor:
    """Estimate the FLOPs of each sample, to compare samples with each other.

    Every supervised position counts as rolled out over all steps, and with a window a sample as if it had one
    answer.

    Args:
        supervision: int64 [N, 3]: keys, supervised positions, and pairs of both.

    Returns:
        float64 [N].
    """
    if config.sliding_window is not None:
        assert config.key_reach is not None
        keys, positions, pairs = supervision.unbind(1)
        keys = torch.minimum(keys, positions + config.key_reach)
        supervision = torch.stack(
            (keys, positions, torch.minimum(pairs, positions * config.sliding_window)), dim=1
        )
    flops = _unit_flops(config, num_steps, head_trained)
    return supervision.double() @ torch.tensor(flops, dtype=torch.float64)


def draft_costs(config: DrafterConfig, num_steps: int, head_trained: bool) -> DraftCosts:
    """Return the FLOPs of a row that is rolled out over all steps."""
    _, row, pair = _unit_flops(config, num_steps, head_trained)
    return DraftCosts(row, pair, config.sliding_window)


def _unit_flops(config: DrafterConfig, num_steps: int, head_trained: bool) -> list[int]:
    """Return the FLOPs, linear in the counts, of a key, of a row over all steps, and of a pair of both."""
    none = StepCounts(keys=0, rows=(0,) * num_steps, causal_pairs=0, teachers=0)
    of_each = (
        replace(none, keys=1),
        replace(none, rows=(1,) * num_steps, teachers=1),
        replace(none, causal_pairs=num_steps),
    )
    return [step_flops(config, one, head_trained).total for one in of_each]


def _projections(
    config: DrafterConfig, counts: StepCounts, computed: int, reads_embedding: bool, last: bool
) -> int:
    """Return the FLOPs of q, k, v and o of one layer with queries at `computed` (row, step) pairs."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    keys = counts.keys + counts.rolled_out - counts.rows[0]
    tokens = counts.keys + counts.teachers if reads_embedding else 0
    query_tokens = 0 if not reads_embedding else counts.teachers if last else tokens
    of = attention_projections(config)
    first = (tokens + keys) * hidden * of.key_width + (query_tokens + computed) * hidden * of.query_width
    second = keys * of.key_products + computed * of.query_products
    return 6 * (first + second + computed * heads * config.value_width * hidden)


class Projections(NamedTuple):
    """The products that make a row's query, and its keys and values."""

    query_width: int  # of the products with the hidden state, which the embedding's products are added to
    key_width: int
    query_products: int = 0  # multiplications of a row in the products after these
    key_products: int = 0
    query_kept: int = 0  # elements of a row between the two, kept for the backward pass
    key_kept: int = 0


def attention_projections(config: DrafterConfig) -> Projections:
    """Return what the FLOPs and the memory of attention's projections follow from."""
    shape, heads = config.attention, config.num_attention_heads
    query_width, key_width = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    if not isinstance(shape, MlaShape):
        kept = (query_width, key_width) if isinstance(shape, NormedGqaShape) else (0, 0)
        return Projections(query_width, 2 * key_width, query_kept=kept[0], key_kept=kept[1])
    return Projections(
        query_width=shape.q_lora_rank,
        key_width=shape.kv_lora_rank + shape.qk_rope_head_dim,
        query_products=shape.q_lora_rank * query_width,
        key_products=shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim),
        query_kept=2 * shape.q_lora_rank,
        key_kept=2 * shape.kv_lora_rank + shape.qk_rope_head_dim,
    )
