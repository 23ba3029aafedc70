"""The configuration of a drafter: its shape, its norms, and the target hidden states that it reads."""

from dataclasses import dataclass, field
from typing import Any

from eagle31.errors import UserError
from eagle31.model.shapes import OPTIONAL_PARTS, AttentionShape, GqaShape, NormedGqaShape

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


_EAGLE_PARTS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "attention_bias")


@dataclass(frozen=True)
class DSparkShape:
    """What a drafter has that drafts all tokens in one pass.

    DFlash (arXiv 2602.06036) has no Markov head, and its first query, the anchor, is none of the draft's.
    """

    size: int  # the tokens of a draft, where nothing else says how many
    mask_token_id: int  # of the queries after the first, whose tokens are not known yet
    markov_rank: int  # of the head by which a draft token changes the logits of the next; 0: DFlash

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("markov_rank", 0)):
            if getattr(self, name) < least:
                raise UserError(f"drafter.{name}", getattr(self, name), f"It must be at least {least}.")

    @property
    def is_dflash(self) -> bool:
        return not self.markov_rank

    def num_queries(self, num_tokens: int) -> int:
        """Return the queries of a draft of so many tokens."""
        return num_tokens + self.is_dflash


@dataclass(frozen=True)
class DrafterConfig:
    """The configuration of a drafter.

    EAGLE 3.1 by default. EAGLE 3 has no `fc_norm` and no `norm_output`; DSpark has neither, but a `dspark`.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]  # number of decoder layers applied: 0 is the embedding's output
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 2048
    # Positions that a query reads, its own included; None: all that are not later.
    sliding_window: int | None = None
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    # Of others' drafters: a norm of all aux hidden states together, and biases; kinds of attention differ in
    # which of them vLLM has.
    norm_before_fc: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention: AttentionShape = field(default_factory=GqaShape)
    dspark: DSparkShape | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise UserError(f"drafter.{name}", getattr(self, name), "It must be at least 1.")
        if not 0 < self.rms_norm_eps < 1:
            raise UserError("drafter.rms_norm_eps", self.rms_norm_eps, "It must be in (0, 1), such as 1e-6.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                "drafter.num_key_value_heads",
                self.num_key_value_heads,
                f"It must divide num_attention_heads ({self.num_attention_heads}).",
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UserError(
                "drafter.sliding_window", self.sliding_window, "It must be at least 1; null has no window."
            )
        for name in OPTIONAL_PARTS:
            if getattr(self, name) and name not in self.attention.optional_parts:
                remedy = f"vLLM's drafter with {self.attention.title} has no such part."
                raise UserError(f"drafter.{name}", getattr(self, name), remedy)
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise UserError(
                "drafter.draft_vocab_size",
                self.draft_vocab_size,
                f"It must be between 1 and the target's vocabulary size ({self.vocab_size}); null takes all.",
            )
        if not self.aux_layer_ids or list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)):
            raise UserError(
                "drafter.aux_layer_ids",
                list(self.aux_layer_ids),
                "Give at least one id, in ascending order and each once: vLLM sorts and deduplicates them.",
            )
        self.attention.check(self.head_dim, self.rope_parameters)
        if self.dspark is not None:
            self._check_dspark(self.dspark)

    def _check_dspark(self, shape: DSparkShape) -> None:
        if not isinstance(self.attention, NormedGqaShape):
            remedy = "Set gqa_qk_norm, which vLLM's drafters with DSpark and DFlash have."
            raise UserError("drafter.attention", self.attention.name, remedy)
        for name in ("sliding_window", *_EAGLE_PARTS):
            if value := getattr(self, name):
                raise UserError(f"drafter.{name}", value, "DSpark drafters have no such part.")
        if not 0 <= shape.mask_token_id < self.vocab_size:
            remedy = f"It must be a token of the target's vocabulary ({self.vocab_size})."
            raise UserError("drafter.mask_token_id", shape.mask_token_id, remedy)

    @property
    def key_reach(self) -> int | None:
        """Return how many rows before a query its output depends on, over all layers; None: all of them."""
        if self.sliding_window is None:
            return None
        return self.num_hidden_layers * (self.sliding_window - 1)

    @property
    def served_rope(self) -> dict[str, Any]:
        """Return `rope_parameters` without the keys that neither training nor vLLM's drafter reads."""
        rope_type = self.rope_parameters.get("rope_type", "default")
        read = self.attention.rope_keys[rope_type]
        given = {key: self.rope_parameters[key] for key in read if self.rope_parameters.get(key) is not None}
        return {"rope_type": rope_type, "rope_theta": self.rope_theta, **given}

    @property
    def rope_theta(self) -> float:
        return float(self.rope_parameters["rope_theta"])

    @property
    def rotary_width(self) -> int:
        """Return the width of the part of a query or key that RoPE rotates."""
        return self.attention.rotary_width(self.head_dim)

    @property
    def value_width(self) -> int:
        """Return the width of one head's values."""
        return self.attention.value_width(self.head_dim)

    @property
    def attention_scale(self) -> float:
        """Return the factor of the scores before the softmax."""
        return self.head_dim**-0.5 * self.attention.score_factor(self.rope_parameters)

    @property
    def pruned(self) -> bool:
        """Return whether the draft vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.vocab_size
