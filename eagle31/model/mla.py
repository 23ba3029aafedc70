"""Multi-head latent attention: what it says of itself, and its projections.

Training and decoding here expand the latent to the keys and values of every head, as DeepSeek trains it. vLLM
decodes on the latent itself, which is the same sum in another order.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; `DeepseekV2MLAAttention` in vLLM's deepseek_v2.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from eagle31.errors import UserError
from eagle31.kernels.elementwise import RMSNorm, StepLinear, rotate_pairs
from eagle31.kernels.split_linear import SplitLinear, project
from eagle31.model.attention import NO_PRODUCTS, AttentionModule, AttentionShape, Products, Projections
from eagle31.model.rope import ROPE_KEYS, check_rope, yarn_magnitude

if TYPE_CHECKING:
    from eagle31.model.config import DrafterConfig


@dataclass(frozen=True)
class MlaShape(AttentionShape):
    """The widths of multi-head latent attention.

    Each head has its own keys: the drafter's `num_key_value_heads` is the number of heads, and its `head_dim`
    the width of their queries and keys. Queries always have a latent: vLLM fuses the two first projections,
    so it cannot load a drafter without.
    """

    name = "mla"
    title = "MLA"
    architectures = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
    # vLLM reads a drafter of type "deepseek_v3" as a multi-token prediction head.
    model_types = ("kimi_k2", "deepseek_v3", "deepseek_v2")
    required_keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    default_positions = 4096
    # vLLM reads every scaling as DeepSeek's YaRN, which knows no other attention factor and always truncates
    # its correction range.
    rope_keys: ClassVar = {
        "default": (),
        "yarn": tuple(key for key in ROPE_KEYS["yarn"] if key not in ("attention_factor", "truncate")),
    }
    has_window = False
    optional_parts = ()
    in_speculators = False
    in_sglang = True

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

    def _heads(self, num_heads: int) -> dict[str, Any]:
        return {"attention": self, "num_key_value_heads": num_heads, "head_dim": self.head_dim}

    @classmethod
    def from_target(
        cls, given: Mapping[str, Any], target: Any, num_heads: int, head_dim: int
    ) -> dict[str, Any]:
        chosen: dict[str, Any] = {
            name: getattr(target, name, None) if given[name] is None else given[name] for name in cls.widths()
        }
        for name, value in chosen.items():
            if value is None:
                raise UserError(f"drafter.{name}", None, "The target has no such width; set it.")
        shape = cls(**chosen)
        if given["head_dim"] not in (None, shape.head_dim):
            remedy = "With MLA it is drafter.qk_nope_head_dim + drafter.qk_rope_head_dim; remove it."
            raise UserError("drafter.head_dim", given["head_dim"], remedy)
        return shape._heads(num_heads)

    @classmethod
    def from_json(cls, layer: Mapping[str, Any]) -> dict[str, Any]:
        return cls(**{name: layer[name] for name in cls.widths()})._heads(layer["num_attention_heads"])

    @classmethod
    def check_json(cls, layer: Mapping[str, Any]) -> None:
        if layer.get("model_type") not in cls.model_types:
            remedy = f"Supported are {', '.join(cls.model_types)}."
            raise UserError("model_type", layer.get("model_type"), remedy)
        if layer.get("q_lora_rank", 0) is None:  # not missing: it says that queries have no latent
            raise UserError("q_lora_rank", None, "Drafters whose queries have no latent are not supported.")
        for name in ("mla_use_nope", "index_topk"):
            if layer.get(name):
                raise UserError(name, layer[name], "Drafters with this are not supported here.")

    def to_json(self, config: "DrafterConfig") -> dict[str, Any]:
        return asdict(self)  # no head_dim, which some versions of transformers read as qk_rope_head_dim

    def module(self, config: "DrafterConfig", reads_embedding: bool) -> AttentionModule:
        return LatentAttention(config, reads_embedding)

    def check(self, config: "DrafterConfig") -> None:
        assert config.num_key_value_heads == config.num_attention_heads
        assert config.head_dim == self.head_dim
        check_rope(config.rope_parameters, self.rope_keys)
        if config.rope_parameters.get("rope_type", "default") == "yarn":
            _check_yarn(config.rope_parameters)

    def projections(self, config: "DrafterConfig") -> Projections:
        heads = config.num_attention_heads
        return Projections(
            query_width=self.q_lora_rank,
            key_width=self.kv_lora_rank + self.qk_rope_head_dim,
            query_products=self.q_lora_rank * heads * self.head_dim,
            key_products=self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim),
            query_kept=2 * self.q_lora_rank,
            key_kept=2 * self.kv_lora_rank + self.qk_rope_head_dim,
        )

    def rotary_width(self, config: "DrafterConfig") -> int:
        return self.qk_rope_head_dim

    def value_width(self, config: "DrafterConfig") -> int:
        return self.v_head_dim

    def score_factor(self, rope_parameters: Mapping[str, Any]) -> float:
        """Return YaRN's temperature.

        Source: DeepSeek-V2 (arXiv 2405.04434), section 3.1.4; `DeepseekV2MLAAttention` in vLLM.
        """
        all_dim = rope_parameters.get("mscale_all_dim")
        if rope_parameters.get("rope_type", "default") == "default" or not all_dim:
            return 1.0
        return yarn_magnitude(rope_parameters["factor"], all_dim) ** 2


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


class LatentAttention(AttentionModule):
    """Queries and keys with a part without positions and a rotated part, whose key all heads share.

    Values are narrower than keys.
    """

    compresses = True

    def __init__(self, config: "DrafterConfig", reads_embedding: bool) -> None:
        super().__init__()
        shape, num_heads, width = config.attention, config.num_attention_heads, config.hidden_size
        assert isinstance(shape, MlaShape)
        self.num_heads = num_heads
        self.value_widths = [shape.qk_nope_head_dim, shape.v_head_dim]
        self.latent_widths = [shape.kv_lora_rank, shape.qk_rope_head_dim]
        linear, input_size = (SplitLinear, 2 * width) if reads_embedding else (nn.Linear, width)
        self.q_a_proj = linear(input_size, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank, eps=config.rms_norm_eps)
        self.q_b_proj = StepLinear(shape.q_lora_rank, num_heads * config.head_dim, bias=False)
        # The latent and the shared rotary key in one weight, as DeepSeek has it; for Muon it is one matrix.
        self.kv_a_proj_with_mqa = linear(input_size, sum(self.latent_widths), bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, eps=config.rms_norm_eps)
        self.kv_b_proj = StepLinear(shape.kv_lora_rank, num_heads * sum(self.value_widths), bias=False)
        self.o_proj = StepLinear(num_heads * shape.v_head_dim, width, bias=False)

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        return self.q_a_proj, self.kv_a_proj_with_mqa

    def query(self, x: Tensor, cos: Tensor, sin: Tensor, products: Products = NO_PRODUCTS) -> Tensor:
        query = self.q_b_proj(self.q_a_layernorm(project(self.q_a_proj, x, products[0])))
        return rotate_pairs(query.unflatten(-1, (self.num_heads, -1)), cos, sin)

    def compressed(
        self, x: Tensor, cos: Tensor, sin: Tensor, products: Products = NO_PRODUCTS
    ) -> tuple[Tensor, Tensor]:
        """Return the normed latent and the rotated key that all heads share."""
        latent, turned = project(self.kv_a_proj_with_mqa, x, products[1]).split(self.latent_widths, dim=-1)
        return self.kv_a_layernorm(latent), rotate_pairs(turned.unsqueeze(1), cos, sin)

    def expanded(self, compressed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        latent, turned = compressed
        products = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1))
        plain, value = products.split(self.value_widths, dim=-1)
        # A copy, so that attention does not keep the full expanded product for its backward pass.
        keys = torch.cat((plain, turned.expand(-1, self.num_heads, -1)), dim=-1)
        return keys, value.contiguous()
