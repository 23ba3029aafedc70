"""Memory of one training step by formula: what forward keeps for backward, and what the loss holds at once.

Counted are tensors, as torch's allocator does: neither what kernels take inside, nor fragments.
"""

from dataclasses import dataclass, fields

from eagle31.cost.flops import StepCounts
from eagle31.model.config import DrafterConfig
from eagle31.training.step import chunk_positions

_WIDE = 4  # float32


@dataclass(frozen=True)
class StepMemory:
    """Bytes by part, each at its own peak."""

    batch: int  # the row's hidden states
    activations: int  # of the rollout, kept for the backward pass
    state_gradients: int  # of what the head reads, made by the loss
    head_gradient: int  # accumulated in float32, where the head is trained
    loss_chunk: int  # logits, distributions
    backward: int  # the largest module's gradients, and the state's between the modules

    @property
    def total(self) -> int:
        """At the step's peak: the chunk is gone when the backward pass starts."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        largest = max(parts.pop("loss_chunk"), parts.pop("backward"))
        return sum(parts.values()) + largest


def step_memory(
    config: DrafterConfig,
    counts: StepCounts,
    *,
    row_tokens: int,
    itemsize: int,
    head_trained: bool,
    activation_checkpointing: bool,
    device: str,
    with_metrics: bool = True,
) -> StepMemory:
    """Of a drafter's forward and backward on one row.

    Args:
        itemsize: bytes of the training dtype.
        device: "cpu" or "cuda", which chunk the loss differently.
        with_metrics: as on logging steps, which look at the target's whole vocabulary.
    """
    hidden, num_aux = config.hidden_size, len(config.aux_layer_ids)
    head = config.draft_vocab_size * hidden
    narrow = itemsize < _WIDE
    step = _Step(config, itemsize)
    first, rolled = counts.rows[0], counts.rolled
    later = rolled - first
    fused = step.fusion(counts.keys)
    shared = step.shared_products(counts)
    if activation_checkpointing:
        kept = step.checkpointed(counts.keys, first, later) + shared
        recomputed = max(
            fused + step.keys(counts.keys) + step.rows(first), step.keys(first) + step.rows(first)
        )
    else:
        layers = config.num_hidden_layers
        kept = fused + shared + step.keys(counts.keys + later) * layers + step.rows(rolled)
        kept += (layers - 1) * step.rows(counts.keys + later)
        recomputed = 0
    return StepMemory(
        batch=row_tokens * (num_aux + 1) * config.target_hidden_size * itemsize,
        activations=kept,
        state_gradients=rolled * hidden * itemsize,
        head_gradient=head * (_WIDE + (itemsize if narrow else 0)) if head_trained else 0,
        loss_chunk=_loss_chunk(config, counts, itemsize, device, with_metrics),
        backward=recomputed + step.backward(counts),
    )


@dataclass(frozen=True)
class _Step:
    """What one row keeps for the backward pass, in bytes; the modules are `drafter.py`'s."""

    config: DrafterConfig
    itemsize: int

    @property
    def query_width(self) -> int:
        return self.config.num_attention_heads * self.config.head_dim

    @property
    def key_value_width(self) -> int:
        return self.config.num_key_value_heads * (self.config.head_dim + self.config.value_width)

    def fusion(self, rows: int) -> int:
        """The aux states that are read, their norms, and what fc makes of them."""
        aux = len(self.config.aux_layer_ids) * self.config.target_hidden_size
        return rows * (aux * (2 if self.config.fc_norm else 1) + self.config.hidden_size) * self.itemsize

    def shared_products(self, counts: StepCounts) -> int:
        """The embeddings and their norm, also once more for the queries."""
        return (2 * counts.tokens + counts.teachers) * self.config.hidden_size * self.itemsize

    def keys(self, rows: int) -> int:
        """The normed state that keys and values are projected from, they themselves, and the rotation."""
        width = self.config.hidden_size + self.key_value_width
        if self.config.mla is not None:
            width += 2 * self.config.mla.kv_lora_rank + self.config.mla.qk_rope_head_dim
        return rows * (width * self.itemsize + 2 * self.config.rotary_width * _WIDE)

    def rows(self, rows: int) -> int:
        """From the query to the normed output; `keys` has what lies before."""
        hidden, heads = self.config.hidden_size, self.config.num_attention_heads
        # Before attention the state itself, narrowed to the rows that go on; behind it the residual sum, its
        # norm, the layer's output and the normed output.
        width = 5 * hidden + self.query_width + heads * self.config.value_width
        width += 2 * self.config.intermediate_size
        if self.config.mla is not None:
            width += 2 * self.config.mla.q_lora_rank
        return rows * (width * self.itemsize + heads * _WIDE)

    def checkpointed(self, keys: int, first: int, later: int) -> int:
        """What passes between the steps: keys and values, the layer's output, its norm, the state."""
        layers = self.config.num_hidden_layers
        passed = (keys + later) * self.key_value_width * layers + (
            3 * first + 3 * later
        ) * self.config.hidden_size
        return passed * self.itemsize

    def backward(self, counts: StepCounts) -> int:
        """The wider of the feed-forward network's and attention's gradients, at the first step."""
        rows, hidden = counts.rows[0], self.config.hidden_size
        mlp = 3 * self.config.intermediate_size
        query = self.query_width
        own = len(counts.rows) - 1
        # The own terms are computed in float32, whatever the training dtype.
        attention = 3 * query * self.itemsize + (4 * query + own * self.key_value_width) * _WIDE
        keys = 2 * counts.keys * self.key_value_width * self.itemsize
        return rows * (max(mlp * self.itemsize, attention) + 2 * hidden * self.itemsize) + keys


def _loss_chunk(
    config: DrafterConfig, counts: StepCounts, itemsize: int, device: str, with_metrics: bool
) -> int:
    num_steps, draft, vocab = len(counts.rows), config.draft_vocab_size, config.vocab_size
    positions = chunk_positions(device, vocab, draft, num_steps, with_metrics)
    positions = min(positions, max(counts.teachers, 1))
    rows = positions * num_steps
    whole = vocab if with_metrics else draft
    probs = positions * draft * _WIDE
    wide = 0 if itemsize == _WIDE else positions * whole * _WIDE
    # Logits, a copy in float32, and what the log-sum-exp over them makes.
    teacher = positions * whole * itemsize + wide + positions * whole * _WIDE
    elementwise = (rows * draft + 2 * positions * draft) * _WIDE if device == "cuda" else 0
    buffers = rows * (draft + config.hidden_size) * itemsize
    return buffers + probs + max(teacher, elementwise)
