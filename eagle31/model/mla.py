"""The projections of multi-head latent attention.

Training and decoding here expand the latent to the keys and values of every head, as DeepSeek trains it. vLLM
decodes on the latent itself, which is the same sum in another order.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; `DeepseekV2MLAAttention` in vLLM's deepseek_v2.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eagle31.kernels.elementwise import RMSNorm, rotate_pairs
from eagle31.kernels.split_linear import SplitLinear, TokenProjection, project
from eagle31.model.config import DrafterConfig


class LatentAttention(nn.Module):
    """Multi-head latent attention without its scores, which the caller computes.

    Queries and keys have a part without positions and a rotated part, whose key all heads share. Values are
    narrower than keys. In the layer that reads the embedding, `x` is concat(embedding, state), or the state
    alone when the embedding's products are given as `tokens`.
    """

    def __init__(self, config: DrafterConfig, reads_embedding: bool) -> None:
        super().__init__()
        assert config.mla is not None
        shape, num_heads, width = config.mla, config.num_attention_heads, config.hidden_size
        self.num_heads = num_heads
        self.key_widths = [shape.qk_nope_head_dim, shape.qk_rope_head_dim]
        self.value_widths = [shape.qk_nope_head_dim, shape.v_head_dim]
        self.latent_widths = [shape.kv_lora_rank, shape.qk_rope_head_dim]
        linear, input_size = (SplitLinear, 2 * width) if reads_embedding else (nn.Linear, width)
        self.q_a_proj = linear(input_size, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank, eps=config.rms_norm_eps)
        self.q_b_proj = nn.Linear(shape.q_lora_rank, num_heads * config.head_dim, bias=False)
        self.kv_a_proj_with_mqa = linear(input_size, sum(self.latent_widths), bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, num_heads * sum(self.value_widths), bias=False)
        self.o_proj = nn.Linear(num_heads * shape.v_head_dim, width, bias=False)

    @property
    def query_input(self) -> nn.Module:
        """Return the projection that `query` starts from."""
        return self.q_a_proj

    @property
    def key_value_inputs(self) -> tuple[nn.Module, ...]:
        """Return the projection that `key_value` starts from."""
        return (self.kv_a_proj_with_mqa,)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor, tokens: TokenProjection | None = None) -> Tensor:
        """Return queries, the last part of each head rotated. [N, in] -> [N, Hq, D]."""
        query = self.q_b_proj(self.q_a_layernorm(project(self.q_a_proj, x, tokens)))
        plain, turned = query.unflatten(-1, (self.num_heads, -1)).split(self.key_widths, dim=-1)
        return torch.cat((plain, rotate_pairs(turned, cos, sin)), dim=-1)

    def key_value(
        self, x: Tensor, cos: Tensor, sin: Tensor, tokens: Sequence[TokenProjection] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys [N, Hq, D], the last part of each head rotated, and values [N, Hq, Dv]. x: [N, in]."""
        (token_products,) = tokens or (None,)
        latent, turned = project(self.kv_a_proj_with_mqa, x, token_products).split(self.latent_widths, dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        plain, value = expanded.split(self.value_widths, dim=-1)
        turned = rotate_pairs(turned.unsqueeze(1), cos, sin).expand(-1, self.num_heads, -1)
        # A copy, so that attention does not keep the full expanded product for its backward pass.
        return torch.cat((plain, turned), dim=-1), value.contiguous()

    def output(self, attended: Tensor) -> Tensor:
        """Project the attended values. [N, Hq, Dv] -> [N, H]."""
        return self.o_proj(attended.flatten(1))
