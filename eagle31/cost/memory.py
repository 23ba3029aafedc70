"""The memory of one training step, by formula.

The formula counts tensors, as PyTorch's allocator does. It leaves out the workspace of kernels and
fragmentation.
"""

from dataclasses import dataclass, replace

from eagle31.cost.flops import StepCounts, attention_projections
from eagle31.kernels.tiled_attention import TILE
from eagle31.model.config import DrafterConfig
from eagle31.training.fused_loss import PRODUCT_ELEMENTS
from eagle31.training.step import positions_at_once
from eagle31.training.teacher_forced import logit_rows

_WIDE = 4  # float32


@dataclass(frozen=True)
class StepMemory:
    """Bytes by part, each at the part's peak."""

    # The packed row's hidden states; on a GPU those of the next row too, copied meanwhile. With chunks they
    # stay in the CPU's memory.
    batch: int
    prefill: int  # of chunks: state, keys and values of the whole row, and their gradients
    activations: int  # the rollout's, kept for the backward pass
    state_gradients: int  # gradients of the head's inputs, made by the loss
    head_gradient: int  # accumulated in float32, if the head is trained
    cast_gradient: int  # the same in the training dtype, which backward passes on; 0 if that is float32
    loss_part: int  # logits, distributions; on the CPU some of the head's gradient
    # At the last step, without the activations that it has released: the gradients of the largest module, of
    # the state between modules, and of the weights, which every step adds to.
    backward: int

    @property
    def total(self) -> int:
        """Return the peak of the step.

        That part is released when the backward pass starts, and the sums in float32 once they are cast.
        """
        largest = max(
            self.head_gradient + self.loss_part, self.head_gradient + self.cast_gradient, self.backward
        )
        return self.batch + self.prefill + self.activations + self.state_gradients + largest


def step_memory(
    config: DrafterConfig,
    counts: StepCounts,
    *,
    row_tokens: int,
    itemsize: int,
    head_trained: bool,
    rollout_chunk: int | None,
    device: str,
    with_metrics: bool = True,
) -> StepMemory:
    """Return the memory of a drafter's forward and backward on one packed row.

    Args:
        itemsize: bytes of the training dtype.
        rollout_chunk: rows that are rolled out at a time; None for all.
        device: "cpu" or "cuda", which have different parts of the loss.
        with_metrics: as on logging steps, which need the target's full vocabulary.
    """
    num_aux, width = len(config.aux_layer_ids), head_width(config)
    # DSpark's two heads are one matrix, a copy that is made for the step. Chunks pass its gradients on, too.
    joined = config.dspark is not None and not config.dspark.is_dflash
    head = config.draft_vocab_size * width if head_trained or joined else 0
    narrow = itemsize < _WIDE
    num_rows = 2 if device == "cuda" else 1
    product = min(head, PRODUCT_ELEMENTS) * itemsize if narrow and device == "cpu" else 0
    step = _Step(config, itemsize, device)
    prefill = 0
    in_chunks = rollout_chunk is not None
    if rollout_chunk is not None:
        prefill = step.prefill(counts.keys)
        if device == "cuda":
            num_rows = 0
        else:
            prefill += counts.keys * TILE * itemsize  # the attention's mask
        rows = tuple(min(rollout_chunk, rows) for rows in counts.rows)
        counts = replace(counts, rows=rows, teachers=min(counts.teachers, rollout_chunk + len(rows) - 1))
    # Chunks drop those of the keys and compute them again, a part at a time where each row is alone.
    of_keys, of_drafts = step.key_activations(counts.keys), step.draft_activations(counts)
    if config.dspark is not None:
        of_keys, of_drafts = step.context_activations(counts.keys), step.dspark_activations(counts)
    kept = of_keys + of_drafts
    if in_chunks:
        alone = config.num_hidden_layers == 1 or config.dspark is not None
        kept = of_drafts if alone else max(of_keys, of_drafts)
    kept += step.padded_values(counts.keys)
    return StepMemory(
        batch=row_tokens * (num_aux + 1) * config.target_hidden_size * itemsize * num_rows,
        prefill=prefill,
        activations=kept + (head * itemsize * (3 if in_chunks else 1) if joined else 0),
        state_gradients=counts.rolled_out * width * itemsize,
        head_gradient=head * _WIDE,
        cast_gradient=head * itemsize if narrow else 0,
        loss_part=_loss_part(config, counts, itemsize, device, with_metrics) + product,
        backward=step.backward(counts, in_chunks) + (head * itemsize if in_chunks else 0),
    )


def head_width(config: DrafterConfig) -> int:
    """Return the width of what the head reads."""
    return config.hidden_size + (0 if config.dspark is None else config.dspark.markov_rank)


def validation_memory(
    config: DrafterConfig,
    *,
    row_tokens: int,
    num_steps: int,
    itemsize: int,
    chunk_rows: int,
    device: str,
) -> int:
    """Return the bytes of replay on one packed row, whose tokens the assistant wrote.

    Args:
        num_steps: tokens of a draft.
        chunk_rows: rows that are prefilled or rolled out together.
        itemsize, device: those of `step_memory`.
    """
    step, layers = _Step(config, itemsize, device), config.num_hidden_layers
    rows = min(chunk_rows, row_tokens)
    at_once = rows * (1 if config.dspark is None else num_steps)  # queries
    hidden, head_dim, key_heads = config.hidden_size, config.head_dim, config.num_key_value_heads
    flash, narrow = step.on_flash, config.value_width < head_dim
    width = hidden + step.key_value_width * layers
    if flash and narrow:
        width += key_heads * head_dim * layers  # values in the kernel's width
    kept = row_tokens * (width + (0 if flash else TILE)) * itemsize  # TILE: of the attention's mask

    def computed(rows: int) -> int:
        """Return the bytes of rows in a layer, in its attention or in its MLP."""
        query, scores = 2 * rows * step.query_width, 0
        if not flash and (device == "cuda" or narrow):  # matrix products of a tile
            scores = (
                2 * config.num_attention_heads * min(rows, TILE) * _WIDE + key_heads * head_dim * itemsize
            )
        merged = max(query * (itemsize if flash else _WIDE), row_tokens * scores)
        attention = (rows * 6 * hidden + query) * itemsize + merged
        mlp = 9 * hidden + config.num_attention_heads * config.value_width + 3 * config.intermediate_size
        return max(rows * mlp * itemsize, attention)

    of = attention_projections(config)
    tokens = (rows + num_steps - 1) * (of.query_width + of.key_width)
    later = (num_steps + 1 if flash else num_steps - 1) * rows * step.key_value_width * layers
    tables = (num_steps + 1) * rows * 2 * config.rotary_width * _WIDE
    logits = min(rows, logit_rows(device, config.vocab_size)) * config.draft_vocab_size * itemsize
    # States, their norms one by one, and all norms; layers before the last need all rows at once.
    fused = len(config.aux_layer_ids) * config.target_hidden_size * (3 if config.fc_norm else 1) + hidden
    prefill = kept + rows * fused * itemsize
    if layers > 1:
        prefill = max(row_tokens * fused * itemsize, computed(row_tokens))
    return max(prefill, kept + (tokens + later) * itemsize + tables + max(computed(at_once), logits))


@dataclass(frozen=True)
class _Step:
    """The bytes that each part of the drafter keeps for the backward pass."""

    config: DrafterConfig
    itemsize: int
    device: str

    @property
    def on_flash(self) -> bool:
        """Return whether the flash kernel for CUDA computes, which has no float32."""
        return self.device == "cuda" and self.itemsize < _WIDE

    @property
    def query_width(self) -> int:
        return self.config.num_attention_heads * self.config.head_dim

    @property
    def key_value_width(self) -> int:
        return self.config.num_key_value_heads * (self.config.head_dim + self.config.value_width)

    def fusion(self, rows: int) -> int:
        """Return the bytes of the aux hidden states, their norms, and fc's output."""
        aux = len(self.config.aux_layer_ids) * self.config.target_hidden_size
        return rows * (aux * (2 if self.config.fc_norm else 1) + self.config.hidden_size) * self.itemsize

    def key_activations(self, keys: int) -> int:
        """Return the bytes of the key rows, from the captured states to the last layer's keys and values."""
        layers = self.config.num_hidden_layers
        # Embeddings, their norm, and the last layer's normed state.
        states = 3 * keys * self.config.hidden_size * self.itemsize
        return self.fusion(keys) + states + layers * self.keys(keys) + (layers - 1) * self.rows(keys)

    def draft_activations(self, counts: StepCounts) -> int:
        """Return the bytes of the rows that are rolled out, in all steps."""
        layers, later = self.config.num_hidden_layers, counts.rolled_out - counts.rows[0]
        # Embeddings and their norm; what the last layer and the final norm make.
        states = 2 * (counts.teachers + counts.rolled_out) * self.config.hidden_size * self.itemsize
        kept = states + layers * self.keys(later) + self.rows(counts.rolled_out)
        return kept + (layers - 1) * self.rows(later) + self.dropped(counts)

    def queries(self, counts: StepCounts) -> int:
        """Return the queries of DSpark, supervised or not."""
        assert self.config.dspark is not None
        return counts.rows[0] * self.config.dspark.num_queries(len(counts.rows))

    def context_activations(self, keys: int) -> int:
        """Return the bytes of DSpark's context, of which every layer makes keys and values."""
        normed = keys * self.config.hidden_size * self.itemsize
        return self.fusion(keys) + normed + self.config.num_hidden_layers * self.keys(keys)

    def dspark_activations(self, counts: StepCounts) -> int:
        """Return the bytes of DSpark's queries."""
        queries, hidden = self.queries(counts), self.config.hidden_size
        # The output once more, with the queries of a row next to each other.
        folded = queries * self.query_width * self.itemsize
        layer = self.rows(queries) + self.keys(queries) + folded
        ends = (2 * queries * hidden + counts.rolled_out * head_width(self.config)) * self.itemsize
        return self.config.num_hidden_layers * layer + ends

    def keys(self, rows: int) -> int:
        """Return the bytes of keys and values, of what their projections keep, and RoPE's tables."""
        width = self.key_value_width + attention_projections(self.config).key_kept
        return rows * (width * self.itemsize + 2 * self.config.rotary_width * _WIDE)

    def rows(self, rows: int) -> int:
        """Return the bytes of a layer but its keys and values and its output, which the next one has."""
        hidden, heads = self.config.hidden_size, self.config.num_attention_heads
        # Before attention: the state of the rows that continue, and its norm. After it: the residual sum and
        # its norm.
        width = 4 * hidden + self.query_width + heads * self.config.value_width
        width += 2 * self.config.intermediate_size
        width += attention_projections(self.config).query_kept
        # In float32 the log-sum-exp of each head and three norms' factors.
        return rows * (width * self.itemsize + (heads + 3) * _WIDE)

    def dropped(self, counts: StepCounts) -> int:
        """Return the bytes that rows of step 0 have at later steps which they do not take part in."""
        missing = len(counts.rows) * counts.rows[0] - counts.rolled_out
        width = self.key_value_width * self.config.num_hidden_layers if self.on_flash else 0
        # RoPE's, which are selected from; `keys` has those of later steps.
        tables = counts.rows[0] * (len(counts.rows) if missing else 1)
        return missing * width * self.itemsize + tables * 2 * self.config.rotary_width * _WIDE

    def prefill(self, keys: int) -> int:
        """Return the bytes of the state, keys and values of a whole row, and of their gradients."""
        width = self.key_value_width * self.config.num_hidden_layers
        return keys * (2 * self.config.hidden_size * self.itemsize + width * (self.itemsize + _WIDE))

    def padded_values(self, keys: int) -> int:
        """Return the bytes of values in the width of keys, where the kernel needs them.

        Layers before the last have them twice, for the key rows and for the drafts.
        """
        if not self.on_flash or self.config.value_width == self.config.head_dim:
            return 0
        width = self.config.num_key_value_heads * self.config.head_dim
        return (2 * self.config.num_hidden_layers - 1) * keys * width * self.itemsize

    def backward(self, counts: StepCounts, in_chunks: bool) -> int:
        """Return the bytes of the larger of MLP's and attention's gradients, and of those of the weights."""
        if self.config.dspark is not None:
            return self.dspark_backward(counts)
        rows, hidden, inner = counts.rows[0], self.config.hidden_size, self.config.intermediate_size
        query, value = self.query_width, self.config.num_attention_heads * self.config.value_width
        later_steps = len(counts.rows) - 1
        weights = (3 * inner + value) * hidden * self.itemsize
        if self.on_flash:
            mlp = inner  # gate and up become their gradients
            # Those of the output, then output and its gradient in the kernel's width, and the query's.
            attention = rows * (value + 3 * query) * self.itemsize
            # Then a call's gradients of keys and values, or all gradients with the rollout terms.
            of_call = 2 * counts.keys * self.config.num_key_value_heads * self.config.head_dim
            of_rows = rows * (query + (1 + later_steps) * self.key_value_width)
            attention += max(of_call, of_rows) * self.itemsize
            # Their sums; `prefill` has those of chunks.
            attention += 0 if in_chunks else counts.keys * self.key_value_width * _WIDE
        else:
            mlp = 3 * inner
            # The rollout terms are computed in float32, whatever the training dtype.
            width = 3 * query * self.itemsize + (4 * query + later_steps * self.key_value_width) * _WIDE
            # The sums over steps and one step's gradients; `prefill` has the sums of chunks.
            keys = (1 if in_chunks else 2) * counts.keys * self.key_value_width * self.itemsize
            narrow = self.config.value_width < self.config.head_dim
            if self.device == "cpu" and not narrow and in_chunks:
                keys *= 2  # the flash kernel reads the keys in another order
            if self.device == "cpu" and narrow:
                # Matrix products of a tile: the keys in another order, and four matrices of scores.
                scores = 4 * self.config.num_attention_heads * TILE * _WIDE
                keys += counts.keys * (self.key_value_width * self.itemsize + scores)
            attention = rows * width + keys
        # The last step has released its MLP's activations, its states and the gradient of the last one.
        released = counts.rows[-1] * (2 * inner + 4 * hidden) * self.itemsize
        largest = max(rows * mlp * self.itemsize, attention - released)
        return rows * 2 * hidden * self.itemsize + largest + weights

    def dspark_backward(self, counts: StepCounts) -> int:
        """Return `backward` of DSpark, whose attention among a draft's queries is computed in float32."""
        queries, hidden = self.queries(counts), self.config.hidden_size
        inner = self.config.intermediate_size
        attention = queries * self.query_width * (3 * self.itemsize + 6 * _WIDE)
        attention += counts.keys * self.key_value_width * (self.itemsize + _WIDE)
        # The layer has released its MLP's activations by then.
        attention -= queries * (2 * inner + 4 * hidden) * self.itemsize
        return queries * 2 * hidden * self.itemsize + max(queries * 3 * inner * self.itemsize, attention)


def _loss_part(
    config: DrafterConfig, counts: StepCounts, itemsize: int, device: str, with_metrics: bool
) -> int:
    num_steps, draft, vocab = len(counts.rows), config.draft_vocab_size, config.vocab_size
    positions = positions_at_once(device, vocab, draft, num_steps, with_metrics)
    positions = min(positions, max(counts.teachers, 1))
    rows = positions * num_steps
    buffers = rows * (draft + head_width(config)) * itemsize
    teacher_width = vocab if with_metrics else draft
    # The states, and the three float32 tensors of which their norm is made, or the norm and the logits.
    of_norm = 3 * config.target_hidden_size * _WIDE
    of_logits = (config.target_hidden_size + teacher_width) * itemsize
    teacher = positions * (config.target_hidden_size * itemsize + max(of_norm, of_logits))
    if device == "cuda":
        kept = positions * draft * itemsize if with_metrics and config.pruned else 0
        return buffers + teacher + kept
    # A copy of the teacher's logits in float32, and the log-sum-exp's temporary.
    wide = 0 if itemsize == _WIDE else positions * teacher_width * _WIDE
    return buffers + positions * draft * _WIDE + teacher + wide + positions * teacher_width * _WIDE
