"""One decoder layer of the drafter."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eagle31.kernels.elementwise import GatedLinear, RMSNorm, StepLinear
from eagle31.kernels.split_linear import TokenProjection
from eagle31.model.attention import Attend, AttentionModule, LayerKeys
from eagle31.model.config import DrafterConfig


class LayerTokens(NamedTuple):
    """Token projections of the first layer's attention, in place of the embeddings."""

    query: TokenProjection | None
    key_value: tuple[TokenProjection, ...] | None


_NO_TOKENS = LayerTokens(None, None)


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
    """A decoder layer. The first reads the token's embedding and the state, later ones the state alone."""

    def __init__(self, config: DrafterConfig, layer_index: int) -> None:
        super().__init__()
        self.reads_embedding = layer_index == 0
        self.norm_before_residual = config.norm_before_residual
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps)
        if self.reads_embedding:
            self.hidden_norm = RMSNorm(width, eps=eps)
        self.self_attn: AttentionModule = config.attention.module(config, self.reads_embedding)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = MLP(config)

    def step(
        self,
        state: Tensor,
        tokens: Tensor | LayerTokens,
        rotation: tuple[Tensor, Tensor],
        add_keys: Callable[[Tensor, Tensor], LayerKeys],
        attend: Attend,
        query_index: slice | None = None,
    ) -> tuple[Tensor, LayerKeys]:
        """Compute keys and values at every row, and the layer's output at the rows of `query_index`.

        Not `forward`: sharded weights are gathered by the modules that are called here.

        Args:
            state: [N, H].
            tokens: embeddings [N, H], or their products; only the first layer reads them.
            rotation: RoPE's cos and sin, float32 [N, D] each.
            add_keys: takes this step's keys and values, and returns those that the queries read.
            query_index: the rows whose output is computed; None for all of them.

        Returns:
            The output [R, H], and what `add_keys` returned.
        """
        x, residual, projections = self._attention_input(state, tokens)
        cos, sin = rotation
        keys = add_keys(*self.self_attn.key_value(x, cos, sin, projections.key_value))
        if query_index is not None:
            x, residual, cos, sin = x[query_index], residual[query_index], cos[query_index], sin[query_index]
        return self._output(x, residual, (cos, sin), projections, attend, keys), keys

    def compressed(
        self, state: Tensor, tokens: Tensor | LayerTokens, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute what `self_attn.expanded` reads alone; the arguments are those of `step`."""
        x, _, projections = self._attention_input(state, tokens)
        return self.self_attn.compressed(x, *rotation, projections.key_value)

    def output(
        self,
        state: Tensor,
        tokens: Tensor | LayerTokens,
        rotation: tuple[Tensor, Tensor],
        attend: Attend,
        keys: LayerKeys,
    ) -> Tensor:
        """Compute the output [N, H] of rows whose keys are known; the arguments are those of `step`."""
        x, residual, projections = self._attention_input(state, tokens)
        return self._output(x, residual, rotation, projections, attend, keys)

    def _output(
        self,
        x: Tensor,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        projections: LayerTokens,
        attend: Attend,
        keys: LayerKeys,
    ) -> Tensor:
        attended = attend(self.self_attn.query(x, *rotation, projections.query), keys)
        hidden, normed = self.post_attention_layernorm(self.self_attn.output(attended), residual)
        return hidden + self.mlp(normed)

    def _attention_input(
        self, state: Tensor, tokens: Tensor | LayerTokens
    ) -> tuple[Tensor, Tensor, LayerTokens]:
        """Return what the projections read, the residual, and the tokens' products if there are any."""
        if not self.reads_embedding:
            return self.input_layernorm(state), state, _NO_TOKENS
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        if isinstance(tokens, LayerTokens):
            return normed, residual, tokens
        return torch.cat((self.input_layernorm(tokens), normed), dim=-1), residual, _NO_TOKENS
