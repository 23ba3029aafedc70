"""The projections of grouped-query attention."""

from collections.abc import Sequence

from torch import Tensor, nn

from eagle31.kernels.elementwise import rotate
from eagle31.kernels.split_linear import SplitLinear, TokenProjection, project
from eagle31.model.config import DrafterConfig


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention without its scores, which the caller computes.

    In the layer that reads the embedding, `x` is concat(embedding, state), or the state alone when the
    embedding's products are given as `tokens`.
    """

    def __init__(self, config: DrafterConfig, reads_embedding: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.hidden_size
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        linear, input_size = (SplitLinear, 2 * width) if reads_embedding else (nn.Linear, width)
        self.q_proj = linear(input_size, query_size, bias=False)
        self.k_proj = linear(input_size, key_size, bias=False)
        self.v_proj = linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, width, bias=False)

    @property
    def query_input(self) -> nn.Module:
        """Return the projection that `query` starts from."""
        return self.q_proj

    @property
    def key_value_inputs(self) -> tuple[nn.Module, ...]:
        """Return the projections that `key_value` starts from."""
        return self.k_proj, self.v_proj

    def query(self, x: Tensor, cos: Tensor, sin: Tensor, tokens: TokenProjection | None = None) -> Tensor:
        """Return the rotated queries. [N, in] -> [N, Hq, D]."""
        return rotate(self._heads(self.q_proj, x, tokens), cos, sin)

    def key_value(
        self, x: Tensor, cos: Tensor, sin: Tensor, tokens: Sequence[TokenProjection] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values. [N, in] -> [N, Hkv, D] each."""
        key_tokens, value_tokens = tokens or (None, None)
        key = rotate(self._heads(self.k_proj, x, key_tokens), cos, sin)
        return key, self._heads(self.v_proj, x, value_tokens)

    def output(self, attended: Tensor) -> Tensor:
        """Project the attended values. [N, Hq, D] -> [N, H]."""
        return self.o_proj(attended.flatten(1))

    def _heads(self, projection: nn.Module, x: Tensor, tokens: TokenProjection | None) -> Tensor:
        return project(projection, x, tokens).unflatten(-1, (-1, self.head_dim))
