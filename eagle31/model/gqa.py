"""Grouped-query attention: what it says of itself, and its projections."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from eagle31.errors import UserError
from eagle31.kernels.elementwise import RMSNorm, StepLinear, rotate
from eagle31.kernels.split_linear import SplitLinear, TokenProjection, project
from eagle31.model.attention import NO_PRODUCTS, AttentionModule, AttentionShape, Products, Projections
from eagle31.model.rope import ROPE_KEYS, check_rope

if TYPE_CHECKING:
    from eagle31.model.config import DrafterConfig


DEEPSPEC = "Qwen3Eagle3Model"  # the architecture of DeepSpec's drafters, which vLLM has under another name


@dataclass(frozen=True)
class GqaShape(AttentionShape):
    """Grouped-query attention; `DrafterConfig` has its widths."""

    name = "gqa"
    title = "GQA"
    # What vLLM 0.32 loads as `Eagle3LlamaForCausalLM`; it adds "Eagle3" to a plain LlamaForCausalLM.
    architectures: ClassVar[tuple[str, ...]] = (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLM",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
    )
    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    default_positions = 2048
    rope_keys = ROPE_KEYS
    has_window = True
    optional_parts: ClassVar[tuple[str, ...]] = ("norm_before_fc", "attention_bias", "mlp_bias")
    in_speculators = True
    in_sglang = True

    @classmethod
    def from_target(
        cls, given: Mapping[str, Any], target: Any, num_heads: int, head_dim: int
    ) -> dict[str, Any]:
        num_key_heads = given["num_key_value_heads"]
        return {
            "attention": cls(),
            "num_key_value_heads": target.num_key_value_heads if num_key_heads is None else num_key_heads,
            "head_dim": head_dim if given["head_dim"] is None else given["head_dim"],
        }

    @classmethod
    def from_json(cls, layer: Mapping[str, Any]) -> dict[str, Any]:
        num_heads, width = layer["num_attention_heads"], layer["hidden_size"]
        if width % num_heads:
            raise UserError("hidden_size", width, f"It must be a multiple of {num_heads} heads.")
        return {
            "attention": cls(),
            "num_key_value_heads": layer.get("num_key_value_heads") or num_heads,
            "head_dim": layer.get("head_dim") or width // num_heads,
        }

    @classmethod
    def check_json(cls, layer: Mapping[str, Any]) -> None:
        pass

    def to_json(self, config: "DrafterConfig") -> dict[str, Any]:
        return {"head_dim": config.head_dim}

    def module(self, config: "DrafterConfig", reads_embedding: bool) -> AttentionModule:
        return GroupedQueryAttention(config, reads_embedding)

    def check(self, config: "DrafterConfig") -> None:
        if config.head_dim % 2:
            raise UserError("drafter.head_dim", config.head_dim, "RoPE needs an even head_dim.")
        check_rope(config.rope_parameters, self.rope_keys)

    def projections(self, config: "DrafterConfig") -> Projections:
        heads = config.num_attention_heads, config.num_key_value_heads
        return Projections(heads[0] * config.head_dim, heads[1] * 2 * config.head_dim)


@dataclass(frozen=True)
class NormedGqaShape(GqaShape):
    """Grouped-query attention with a norm of each head's queries and keys, as Qwen3 has it."""

    name = "gqa_qk_norm"
    title = "GQA with norms of queries and keys"
    architectures = ("Eagle3Qwen3ForCausalLM", DEEPSPEC)
    model_types = ("qwen3",)
    required_keys = ("num_key_value_heads", "head_dim")
    default_positions = 32768
    optional_parts = ("norm_before_fc", "attention_bias")
    in_sglang = False

    def to_json(self, config: "DrafterConfig") -> dict[str, Any]:
        return super().to_json(config) | {"use_sliding_window": config.sliding_window is not None}

    def projections(self, config: "DrafterConfig") -> Projections:
        kept = [heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)]
        return super().projections(config)._replace(query_kept=kept[0], key_kept=kept[1])


class GroupedQueryAttention(AttentionModule):
    """Queries, keys and values of one width."""

    def __init__(self, config: "DrafterConfig", reads_embedding: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.hidden_size
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        linear, input_size = (SplitLinear, 2 * width) if reads_embedding else (nn.Linear, width)
        normed, bias = isinstance(config.attention, NormedGqaShape), config.attention_bias
        self.q_proj = linear(input_size, query_size, bias=bias)
        self.k_proj = linear(input_size, key_size, bias=bias)
        self.v_proj = linear(input_size, key_size, bias=bias)
        self.o_proj = StepLinear(query_size, width, bias=bias and not normed)  # as vLLM's Qwen3
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if normed else nn.Identity()

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def query(self, x: Tensor, cos: Tensor, sin: Tensor, products: Products = NO_PRODUCTS) -> Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj, x, products[0])), cos, sin)

    def compressed(
        self, x: Tensor, cos: Tensor, sin: Tensor, products: Products = NO_PRODUCTS
    ) -> tuple[Tensor, Tensor]:
        key = rotate(self.k_norm(self._heads(self.k_proj, x, products[1])), cos, sin)
        return key, self._heads(self.v_proj, x, products[2])

    def _heads(self, projection: nn.Module, x: Tensor, product: TokenProjection | None) -> Tensor:
        return project(projection, x, product).unflatten(-1, (-1, self.head_dim))
