"""One decoder layer of the drafter."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from eagle31.kernels.elementwise import GatedLinear, RMSNorm, StepLinear
from eagle31.kernels.plain_attention import Attend, LayerKeys
from eagle31.model.attention import (
    NO_PRODUCTS,
    AttentionModule,
    GroupedQueryAttention,
    LatentAttention,
    Products,
)
from eagle31.model.config import DrafterConfig
from eagle31.model.shapes import MlaShape


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = StepLinear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = StepLinear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = GatedLinear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x), self.up_proj(x))


class DrafterLayer(nn.Module):
    """A decoder layer. EAGLE's first reads the token's embedding and the state, others the state alone."""

    def __init__(self, config: DrafterConfig, reads_embedding: bool) -> None:
        super().__init__()
        self.reads_embedding = reads_embedding
        self.norm_before_residual = config.norm_before_residual
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps)
        if self.reads_embedding:
            self.hidden_norm = RMSNorm(width, eps=eps)
        kind = LatentAttention if isinstance(config.attention, MlaShape) else GroupedQueryAttention
        self.self_attn: AttentionModule = kind(config, self.reads_embedding)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = MLP(config)

    def step(
        self,
        state: Tensor,
        tokens: Tensor | Products,
        rotation: tuple[Tensor, Tensor],
        keys: LayerKeys | Callable[[Tensor, Tensor], LayerKeys],
        attend: Attend,
        query_index: slice | None = None,
    ) -> tuple[Tensor, LayerKeys]:
        """Compute the layer's output at the rows of `query_index`.

        Not `forward`: sharded weights are gathered by the modules that are called here.

        Args:
            state: [N, H].
            tokens: embeddings [N, H], or their products; only EAGLE's first layer reads them.
            rotation: RoPE's cos and sin, float32 [N, D] each.
            keys: those that the queries read; or a function that takes this step's keys and values, which are
                then computed at every row, and returns them.
            query_index: the rows whose output is computed; None for all of them.

        Returns:
            The output [R, H], and the keys.
        """
        x, residual, products = self._attention_input(state, tokens)
        if not isinstance(keys, LayerKeys):
            keys = keys(*self.self_attn.expanded(self.self_attn.compressed(x, rotation, products)))
        if query_index is not None:
            x, residual, cos, sin = (part[query_index] for part in (x, residual, *rotation))
            rotation = cos, sin
        attended = attend(self.self_attn.query(x, rotation, products), keys)
        hidden, normed = self.post_attention_layernorm(self.self_attn.output(attended), residual)
        return hidden + self.mlp(normed), keys

    def compressed(
        self, state: Tensor, tokens: Tensor | Products, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute what `self_attn.expanded` reads alone; the arguments are those of `step`."""
        x, _, products = self._attention_input(state, tokens)
        return self.self_attn.compressed(x, rotation, products)

    def _attention_input(self, state: Tensor, tokens: Tensor | Products) -> tuple[Tensor, Tensor, Products]:
        """Return what the projections read, the residual, and the tokens' products if there are any."""
        if not self.reads_embedding:
            return self.input_layernorm(state), state, NO_PRODUCTS
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        if not isinstance(tokens, Tensor):
            return normed, residual, tokens
        return torch.cat((self.input_layernorm(tokens), normed), dim=-1), residual, NO_PRODUCTS
