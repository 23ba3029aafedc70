"""What a kind of attention says of itself; `eagle31.model.config.ATTENTIONS` has the kinds."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from torch import Tensor, nn

from eagle31.kernels.split_linear import TokenProjection

if TYPE_CHECKING:
    from eagle31.model.config import DrafterConfig


class Projections(NamedTuple):
    """The products that make a row's query, and its keys and values."""

    query_width: int  # of the products with the hidden state, which the embedding's products are added to
    key_width: int
    query_products: int = 0  # multiplications of a row in the products after these
    key_products: int = 0
    query_kept: int = 0  # elements of a row between the two, kept for the backward pass
    key_kept: int = 0


@dataclass(frozen=True)
class AttentionShape(ABC):
    """A kind of attention with its own widths, which are fields of its dataclass and keys of config.json.

    What it says is the same for each drafter of its kind, apart from what takes a `DrafterConfig`.
    """

    name: ClassVar[str]  # as `drafter.attention` has it
    title: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]  # that vLLM loads as this kind; an export has the first
    model_types: ClassVar[tuple[str, ...]]  # that are read here; an export has the first
    required_keys: ClassVar[tuple[str, ...]] = ()  # of config.json, in addition to the layer's sizes
    default_positions: ClassVar[int]  # vLLM's max_position_embeddings where config.json has none
    rope_keys: ClassVar[dict[str, tuple[str, ...]]]  # that vLLM reads, by rope_type
    has_window: ClassVar[bool]  # whether vLLM serves it with a sliding window
    optional_parts: ClassVar[tuple[str, ...]]  # fields of `DrafterConfig` for parts that vLLM has with it
    in_speculators: ClassVar[bool]  # whether vLLM reads it in the layout of speculators
    in_sglang: ClassVar[bool]  # whether SGLang has it

    @classmethod
    def widths(cls) -> tuple[str, ...]:
        """Return the names of its own widths."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    @abstractmethod
    def from_target(
        cls, given: Mapping[str, Any], target: Any, num_heads: int, head_dim: int
    ) -> dict[str, Any]:
        """Return `attention`, `num_key_value_heads` and `head_dim` of a `DrafterConfig`.

        Args:
            given: the recipe's settings of the drafter; None takes the target's.
            target: the target's text config, of transformers.
            head_dim: the width of the target's heads.

        Raises:
            UserError: neither gives a width, or the recipe's contradict each other.
        """

    @classmethod
    @abstractmethod
    def from_json(cls, layer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same of a published config.json, whose `required_keys` are numbers.

        Raises:
            UserError: a value is not supported.
        """

    @classmethod
    @abstractmethod
    def check_json(cls, layer: Mapping[str, Any]) -> None:
        """Raise UserError for keys of a published config.json that are not supported here."""

    @abstractmethod
    def to_json(self, config: "DrafterConfig") -> dict[str, Any]:
        """Return its keys of config.json, apart from the number of heads."""

    @abstractmethod
    def module(self, config: "DrafterConfig", reads_embedding: bool) -> "AttentionModule":
        """Return the projections of a layer."""

    @abstractmethod
    def check(self, config: "DrafterConfig") -> None:
        """Raise UserError if the drafter's heads or RoPE are not possible."""

    @abstractmethod
    def projections(self, config: "DrafterConfig") -> Projections:
        """Return what the FLOPs and the memory of a step follow from."""

    def rotary_width(self, config: "DrafterConfig") -> int:
        """Return the width of the part of a query or key that RoPE rotates."""
        return config.head_dim

    def value_width(self, config: "DrafterConfig") -> int:
        """Return the width of one head's values."""
        return config.head_dim

    def score_factor(self, rope_parameters: Mapping[str, Any]) -> float:
        """Return the factor of the scores in addition to head_dim^-0.5."""
        return 1.0


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
