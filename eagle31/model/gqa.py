"""Grouped-query attention: its projections. The scores are `attention.py`'s and `flash.py`'s."""

from collections.abc import Sequence

from torch import Tensor, nn

from eagle31.kernels.elementwise import rotate
from eagle31.kernels.split_linear import SplitLinear, TokenProjection, projected
from eagle31.model.config import DrafterConfig


class GroupedQueryAttention(nn.Module):
    """A layer that reads the embedding beside the state can be given the embedding's share of the projections
    that read it, and the state alone for `x`.
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
        """The projection that `query` starts from."""
        return self.q_proj

    @property
    def key_value_inputs(self) -> tuple[nn.Module, ...]:
        """The projections that `key_value` starts from."""
        return self.k_proj, self.v_proj

    def query(self, x: Tensor, cos: Tensor, sin: Tensor, share: TokenProjection | None = None) -> Tensor:
        """[N, in] -> rotated [N, Hq, D]."""
        return rotate(self._heads(self.q_proj, x, share), cos, sin)

    def key_value(
        self, x: Tensor, cos: Tensor, sin: Tensor, shares: Sequence[TokenProjection] | None = None
    ) -> tuple[Tensor, Tensor]:
        """[N, in] -> rotated keys and values, both [N, Hkv, D]."""
        key_share, value_share = shares or (None, None)
        key = rotate(self._heads(self.k_proj, x, key_share), cos, sin)
        return key, self._heads(self.v_proj, x, value_share)

    def output(self, attended: Tensor) -> Tensor:
        """[N, Hq, D] -> [N, H]."""
        return self.o_proj(attended.flatten(1))

    def _heads(self, projection: nn.Module, x: Tensor, share: TokenProjection | None) -> Tensor:
        return projected(projection, x, share).unflatten(-1, (-1, self.head_dim))
