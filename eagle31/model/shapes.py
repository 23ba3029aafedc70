"""The kinds of attention: their widths, and what vLLM's drafters can have with them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from eagle31.errors import UserError
from eagle31.model.rope import ROPE_KEYS, check_rope, yarn_magnitude

# Fields of `DrafterConfig` for parts that vLLM does not have with every kind of attention.
OPTIONAL_PARTS = ("norm_before_fc", "attention_bias", "mlp_bias", "sliding_window")


@dataclass(frozen=True)
class AttentionShape:
    """A kind of attention with its own widths, in addition to the heads of `DrafterConfig`.

    They are fields of its dataclass and keys of config.json.
    """

    name: ClassVar[str]  # as `drafter.attention` has it
    title: ClassVar[str]
    rope_keys: ClassVar[dict[str, tuple[str, ...]]] = ROPE_KEYS  # that vLLM reads, by rope_type
    optional_parts: ClassVar[tuple[str, ...]]  # those of `OPTIONAL_PARTS` that vLLM has with it

    @classmethod
    def widths(cls) -> tuple[str, ...]:
        """Return the names of its widths."""
        return tuple(field.name for field in fields(cls))

    def rotary_width(self, head_dim: int) -> int:
        """Return the width of the part of a query or key that RoPE rotates."""
        return head_dim

    def value_width(self, head_dim: int) -> int:
        """Return the width of one head's values."""
        return head_dim

    def score_factor(self, rope_parameters: Mapping[str, Any]) -> float:
        """Return the factor of the scores in addition to head_dim^-0.5."""
        return 1.0

    def check(self, head_dim: int, rope_parameters: dict[str, Any]) -> None:
        """Raise UserError if the drafter's heads or RoPE are not possible."""
        if self.rotary_width(head_dim) % 2:
            raise UserError("drafter.head_dim", head_dim, "RoPE needs an even head_dim.")
        check_rope(rope_parameters, self.rope_keys)


@dataclass(frozen=True)
class GqaShape(AttentionShape):
    """Grouped-query attention; `DrafterConfig` has its widths."""

    name = "gqa"
    title = "GQA"
    optional_parts: ClassVar[tuple[str, ...]] = OPTIONAL_PARTS


@dataclass(frozen=True)
class NormedGqaShape(GqaShape):
    """Grouped-query attention with a norm of each head's queries and keys, as Qwen3 has it."""

    name = "gqa_qk_norm"
    title = "GQA with norms of queries and keys"
    optional_parts = ("norm_before_fc", "attention_bias", "sliding_window")


@dataclass(frozen=True)
class MlaShape(AttentionShape):
    """The widths of multi-head latent attention.

    Each head has its own keys: the drafter's `num_key_value_heads` is the number of heads, and its `head_dim`
    the width of their queries and keys. Queries always have a latent: vLLM fuses the two first projections,
    so it cannot load a drafter without.
    """

    name = "mla"
    title = "MLA"
    # vLLM reads every scaling as DeepSeek's YaRN, which knows no other attention factor and always truncates
    # its correction range.
    rope_keys: ClassVar = {
        "default": (),
        "yarn": tuple(key for key in ROPE_KEYS["yarn"] if key not in ("attention_factor", "truncate")),
    }
    optional_parts = ()

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise UserError(f"drafter.{name}", value, "It must be at least 1.")
        if self.qk_rope_head_dim % 2:
            raise UserError(
                "drafter.qk_rope_head_dim", self.qk_rope_head_dim, "It must be even: RoPE rotates pairs."
            )
        if self.v_head_dim > self.head_dim:
            remedy = f"vLLM's kernels need values no wider than queries and keys ({self.head_dim})."
            raise UserError("drafter.v_head_dim", self.v_head_dim, remedy)

    @property
    def head_dim(self) -> int:
        """Return the width of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def rotary_width(self, head_dim: int) -> int:
        return self.qk_rope_head_dim

    def value_width(self, head_dim: int) -> int:
        return self.v_head_dim

    def score_factor(self, rope_parameters: Mapping[str, Any]) -> float:
        """Return YaRN's temperature.

        Source: DeepSeek-V2 (arXiv 2405.04434), section 3.1.4; `DeepseekV2MLAAttention` in vLLM.
        """
        all_dim = rope_parameters.get("mscale_all_dim")
        if rope_parameters.get("rope_type", "default") == "default" or not all_dim:
            return 1.0
        return yarn_magnitude(rope_parameters["factor"], all_dim) ** 2

    def check(self, head_dim: int, rope_parameters: dict[str, Any]) -> None:
        assert head_dim == self.head_dim
        super().check(head_dim, rope_parameters)
        if rope_parameters.get("rope_type", "default") == "yarn":
            _check_yarn(rope_parameters)


# By the name that `drafter.attention` has for them.
ATTENTIONS: dict[str, type[AttentionShape]] = {
    kind.name: kind for kind in (GqaShape, NormedGqaShape, MlaShape)
}


def _check_yarn(rope_parameters: Mapping[str, Any]) -> None:
    """Raise UserError where YaRN's keys mean different things to transformers and vLLM."""
    for key in ("factor", "original_max_position_embeddings"):
        if rope_parameters.get(key) is None:
            raise UserError(f"drafter.rope_parameters.{key}", None, "vLLM's YaRN for MLA requires it.")
    both = [rope_parameters.get(key) for key in ("mscale", "mscale_all_dim")]
    if both != [None, None] and not all(both):
        remedy = "Give both, other than 0, or neither: transformers and vLLM read a single one differently."
        raise UserError("drafter.rope_parameters.mscale, mscale_all_dim", both, remedy)
    for key, neutral in (("attention_factor", None), ("truncate", True)):
        value = rope_parameters.get(key)
        if value not in (None, neutral):
            raise UserError(f"drafter.rope_parameters.{key}", value, "vLLM's YaRN for MLA has no such key.")
