"""The projections of grouped-query attention."""

from torch import Tensor, nn

from eagle31.kernels.elementwise import RMSNorm, StepLinear, rotate
from eagle31.kernels.split_linear import SplitLinear
from eagle31.model.attention import NO_PRODUCTS, AttentionModule, Products
from eagle31.model.config import DrafterConfig
from eagle31.model.shapes import NormedGqaShape


class GroupedQueryAttention(AttentionModule):
    """Queries, keys and values of one width."""

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

    def query(self, x: Tensor, cos: Tensor, sin: Tensor, products: Products = NO_PRODUCTS) -> Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj(x, products[0]))), cos, sin)

    def compressed(
        self, x: Tensor, cos: Tensor, sin: Tensor, products: Products = NO_PRODUCTS
    ) -> tuple[Tensor, Tensor]:
        key = rotate(self.k_norm(self._heads(self.k_proj(x, products[1]))), cos, sin)
        return key, self._heads(self.v_proj(x, products[2]))

    def _heads(self, product: Tensor) -> Tensor:
        return product.unflatten(-1, (-1, self.head_dim))
