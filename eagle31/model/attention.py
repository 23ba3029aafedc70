"""The attention of a drafter's layer: its projections q, k, v and o; `DrafterLayer.step` joins them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from eagle31.kernels.elementwise import RMSNorm, StepLinear, rotate
from eagle31.kernels.split_linear import SplitLinear, TokenProjection
from eagle31.model.config import DrafterConfig
from eagle31.model.shapes import MlaShape, NormedGqaShape

# What each of `AttentionModule.inputs` adds to its product with the state: that with the token's embedding;
# None where the input has the embedding, or there is none.
Products: TypeAlias = Sequence[TokenProjection | None]
NO_PRODUCTS: Products = (None, None, None)
Pair: TypeAlias = tuple[Tensor, Tensor]


class AttentionModule(nn.Module, ABC):
    """The projections of a layer's attention without its scores, which the caller computes.

    `x` is [N, in]; a rotation is RoPE's cos and sin, float32 [N, W] each.
    """

    compresses: ClassVar[bool] = False  # whether `expanded` computes anything
    o_proj: nn.Module

    @property
    @abstractmethod
    def inputs(self) -> tuple[nn.Module, ...]:
        """The projection that `query` starts from, and those that `compressed` starts from."""

    @abstractmethod
    def query(self, x: Tensor, rotation: Pair, products: Products = NO_PRODUCTS) -> Tensor:
        """Return the rotated queries [N, Hq, D]."""

    @abstractmethod
    def compressed(self, x: Tensor, rotation: Pair, products: Products = NO_PRODUCTS) -> Pair:
        """Return the least from which `expanded` makes each row's keys and values."""

    def expanded(self, compressed: Pair) -> Pair:
        """Return the rotated keys [N, Hkv, D] and the values [N, Hkv, Dv]."""
        return compressed

    def output(self, attended: Tensor) -> Tensor:
        """Project the attended values. [N, Hq, Dv] -> [N, H]."""
        return self.o_proj(attended.flatten(1))


class GroupedQueryAttention(AttentionModule):
    """Grouped-query attention: queries, keys and values of one width."""

    def __init__(self, config: DrafterConfig, reads_embedding: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.hidden_size
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        input_size = 2 * width if reads_embedding else width
        normed, bias = isinstance(config.attention, NormedGqaShape), config.attention_bias
        self.q_proj = SplitLinear(input_size, query_size, bias=bias)
        self.k_proj = SplitLinear(input_size, key_size, bias=bias)
        self.v_proj = SplitLinear(input_size, key_size, bias=bias)
        self.o_proj = StepLinear(query_size, width, bias=bias and not normed)  # as vLLM's Qwen3
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if normed else nn.Identity()

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def query(self, x: Tensor, rotation: Pair, products: Products = NO_PRODUCTS) -> Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj(x, products[0]))), *rotation)

    def compressed(self, x: Tensor, rotation: Pair, products: Products = NO_PRODUCTS) -> Pair:
        key = rotate(self.k_norm(self._heads(self.k_proj(x, products[1]))), *rotation)
        return key, self._heads(self.v_proj(x, products[2]))

    def _heads(self, product: Tensor) -> Tensor:
        return product.unflatten(-1, (-1, self.head_dim))


class LatentAttention(AttentionModule):
    """Multi-head latent attention.

    Queries and keys have a part without positions and a rotated part, whose key all heads share. Values are
    narrower than keys. Training and decoding here expand the latent to the keys and values of every head, as
    DeepSeek trains it. vLLM decodes on the latent itself, which is the same sum in another order.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; `DeepseekV2MLAAttention` in vLLM's deepseek_v2.py.
    """

    compresses = True

    def __init__(self, config: DrafterConfig, reads_embedding: bool) -> None:
        super().__init__()
        shape, num_heads, width = config.attention, config.num_attention_heads, config.hidden_size
        assert isinstance(shape, MlaShape)
        self.num_heads = num_heads
        self.value_widths = [shape.qk_nope_head_dim, shape.v_head_dim]
        self.latent_widths = [shape.kv_lora_rank, shape.qk_rope_head_dim]
        input_size = 2 * width if reads_embedding else width
        self.q_a_proj = SplitLinear(input_size, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank, eps=config.rms_norm_eps)
        self.q_b_proj = StepLinear(shape.q_lora_rank, num_heads * config.head_dim, bias=False)
        # The latent and the shared rotary key in one weight, as DeepSeek has it; for Muon it is one matrix.
        self.kv_a_proj_with_mqa = SplitLinear(input_size, sum(self.latent_widths), bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, eps=config.rms_norm_eps)
        self.kv_b_proj = StepLinear(shape.kv_lora_rank, num_heads * sum(self.value_widths), bias=False)
        self.o_proj = StepLinear(num_heads * shape.v_head_dim, width, bias=False)

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        return self.q_a_proj, self.kv_a_proj_with_mqa

    def query(self, x: Tensor, rotation: Pair, products: Products = NO_PRODUCTS) -> Tensor:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, products[0])))
        return rotate(query.unflatten(-1, (self.num_heads, -1)), *rotation, pairs=True)

    def compressed(self, x: Tensor, rotation: Pair, products: Products = NO_PRODUCTS) -> Pair:
        """Return the normed latent and the rotated key that all heads share."""
        latent, turned = self.kv_a_proj_with_mqa(x, products[1]).split(self.latent_widths, dim=-1)
        return self.kv_a_layernorm(latent), rotate(turned.unsqueeze(1), *rotation, pairs=True)

    def expanded(self, compressed: Pair) -> Pair:
        latent, turned = compressed
        products = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1))
        plain, value = products.split(self.value_widths, dim=-1)
        # A copy, so that attention does not keep the full expanded product for its backward pass.
        keys = torch.cat((plain, turned.expand(-1, self.num_heads, -1)), dim=-1)
        return keys, value.contiguous()
