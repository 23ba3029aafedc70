"""What the attention of a drafter's layer computes apart from its scores."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

from torch import Tensor, nn

from eagle31.kernels.split_linear import TokenProjection

# What each of `AttentionModule.inputs` adds to its product with the state: that with the token's embedding;
# None where the input has the embedding, or there is none.
Products: TypeAlias = Sequence[TokenProjection | None]
NO_PRODUCTS: Products = (None, None, None)


class AttentionModule(nn.Module, ABC):
    """The projections of a layer's attention without its scores, which the caller computes.

    `x` is [N, in], cos and sin are float32 [N, W].
    """

    compresses: ClassVar[bool] = False  # whether `expanded` computes anything
    o_proj: nn.Module

    @property
    @abstractmethod
    def inputs(self) -> tuple[nn.Module, ...]:
        """The projection that `query` starts from, and those that `compressed` starts from."""

    @abstractmethod
    def query(self, x: Tensor, cos: Tensor, sin: Tensor, products: Products = NO_PRODUCTS) -> Tensor:
        """Return the rotated queries [N, Hq, D]."""

    @abstractmethod
    def compressed(
        self, x: Tensor, cos: Tensor, sin: Tensor, products: Products = NO_PRODUCTS
    ) -> tuple[Tensor, Tensor]:
        """Return the least from which `expanded` makes each row's keys and values."""

    def expanded(self, compressed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the rotated keys [N, Hkv, D] and the values [N, Hkv, Dv]."""
        return compressed

    def output(self, attended: Tensor) -> Tensor:
        """Project the attended values. [N, Hq, Dv] -> [N, H]."""
        return self.o_proj(attended.flatten(1))
