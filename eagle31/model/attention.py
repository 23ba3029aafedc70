"""What a kind of attention says of itself, and attention by its definition.

`eagle31.model.config.ATTENTIONS` has the kinds. The definition builds the scores. Decoding uses it, whose
queries are few, and so does the plain reference of the training step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from eagle31.kernels.packed_steps import PackedKeys
from eagle31.kernels.query_run import QueryRun, context_window, tiles
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


@dataclass(frozen=True)
class LayerKeys:
    """One layer's rotated keys and values: of step 0, and of the rows that are rolled out at later steps."""

    keys: Tensor  # [S, Hkv, D]
    values: Tensor  # [S, Hkv, Dv]
    rollout_keys: tuple[Tensor, ...] = ()  # [R_i, Hkv, D] of steps i = 1..k
    rollout_values: tuple[Tensor, ...] = ()  # [R_i, Hkv, Dv]
    # int64 [R], the current rows within the rows of each of these steps; None where they are the same rows.
    row_indices: tuple[Tensor | None, ...] = ()
    # Where the backward pass adds the gradients of step 0's keys and values; None: it returns them.
    sums: tuple[Tensor, Tensor] | None = None
    # Where the flash kernel for CUDA computes: all of these, apart from the last step's.
    packed: PackedKeys | None = None

    def with_step(self, keys: Tensor, values: Tensor) -> "LayerKeys":
        """Return these and the keys and values of one more step, at the current rows."""
        if self.packed is not None:
            return replace(self, rollout_keys=(keys,), rollout_values=(values,))
        return replace(
            self,
            rollout_keys=(*self.rollout_keys, keys),
            rollout_values=(*self.rollout_values, values),
            row_indices=(*self.row_indices, None),
        )

    def for_rows(self, index: Tensor) -> "LayerKeys":
        """Return these for some of the current rows, int64 [R]."""
        indices = (index if before is None else before[index] for before in self.row_indices)
        return replace(self, row_indices=tuple(indices))

    def within(self, window: int | None) -> "LayerKeys":
        """Return these without the rollout keys that are outside of the current step's window.

        Args:
            window: the number of positions that a query reads, its own included; None keeps all keys.
        """
        if window is None or window >= len(self.rollout_keys):
            return self
        kept = slice(-window, None)
        return replace(
            self,
            rollout_keys=self.rollout_keys[kept],
            rollout_values=self.rollout_values[kept],
            row_indices=self.row_indices[kept],
        )


MAX_SCORES = 2**23  # that are held at once where attention is computed by its definition
Attend = Callable[[Tensor, LayerKeys], Tensor]  # query [R, Hq, D] -> [R, Hq, Dv]


def attend_by_run(
    query: Tensor, keys: LayerKeys, runs: Sequence[QueryRun], scale: float, window: int | None = None
) -> Tensor:
    """Apply `rollout_attention` to each run and the keys that it may read, at most `MAX_SCORES` at a time.

    A packed row thus costs what its documents cost.

    Args:
        query: [R, Hq, D], rotated.
        runs: the R queries.
        scale: multiplies the scores.
        window: the number of positions that a query reads, its own included; None for all.

    Returns:
        [R, Hq, Dv] in the query's dtype.
    """
    if not runs:
        return query.new_zeros(*query.shape[:2], keys.values.shape[-1])
    context = context_window(window, len(keys.rollout_keys))
    keys = keys.within(window)
    rollout_keys = _current_rows(keys.rollout_keys, keys.row_indices)
    rollout_values = _current_rows(keys.rollout_values, keys.row_indices)
    parts = []
    most_rows = MAX_SCORES // query.shape[1]
    for run in (
        tile.within(context) for whole in runs for tile in tiles([whole], max(most_rows // whole.num_keys, 1))
    ):
        queries = slice(run.query_start, run.query_stop)
        visible = None if run.num_queries == 1 else _visible(run, context, query.device)
        parts.append(
            rollout_attention(
                query[queries],
                keys.keys[run.key_start : run.key_stop],
                keys.values[run.key_start : run.key_stop],
                visible,
                [key[queries] for key in rollout_keys],
                [value[queries] for value in rollout_values],
                scale,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rollout_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    rollout_keys: Sequence[Tensor],
    rollout_values: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Attend to the visible step-0 keys and to each row's rollout keys of steps 1..k.

    Args:
        query: [R, Hq, D], rotated.
        keys: [S, Hkv, D] of step 0, rotated.
        values: [S, Hkv, Dv] of step 0.
        visible: bool [R, S]; None makes every key visible.
        rollout_keys, rollout_values: k tensors [R, Hkv, D] and [R, Hkv, Dv] of steps 1..k.
        scale: multiplies the scores.

    Returns:
        [R, Hq, Dv] in the query's dtype. Scores and softmax are float32 or wider.
    """
    weights = attention_weights(query, keys, visible, rollout_keys, scale).to(query.dtype)
    return weighted_values(weights, values, rollout_values)


def attention_weights(
    query: Tensor, keys: Tensor, visible: Tensor | None, rollout_keys: Sequence[Tensor], scale: float
) -> Tensor:
    """Return what `rollout_attention` multiplies the values by.

    Returns:
        [Hkv, group, R, S + k], float32 or wider: the weights of step 0's keys, then those of steps 1..k.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    # shape: [Hkv, group, R, D]
    grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = (grouped @ keys.permute(1, 2, 0).unsqueeze(1)).to(wide)  # shape: [Hkv, group, R, S]
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    # shape: [Hkv, group, R, k]
    rollout = [(grouped * key.permute(1, 0, 2).unsqueeze(1)).sum(-1, dtype=wide) for key in rollout_keys]
    if rollout:
        scores = torch.cat((scores, torch.stack(rollout, dim=-1)), dim=-1)
    return (scores * scale).softmax(dim=-1)


def weighted_values(weights: Tensor, values: Tensor, rollout_values: Sequence[Tensor]) -> Tensor:
    """Return the sums of the values. [Hkv, group, R, S + k] -> [R, Hq, Dv]."""
    num_kv_heads, group, num_rows, _ = weights.shape
    num_keys = values.shape[0]
    out = weights[..., :num_keys] @ values.permute(1, 0, 2).unsqueeze(1)
    for step, value in enumerate(rollout_values):
        out = out + weights[..., num_keys + step, None] * value.permute(1, 0, 2).unsqueeze(1)
    return out.permute(2, 0, 1, 3).reshape(num_rows, num_kv_heads * group, values.shape[-1])


def _visible(run: QueryRun, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask of a run, bool [queries, keys]."""
    mask = torch.ones(run.num_queries, run.num_keys, dtype=torch.bool, device=device)
    last = run.num_keys - run.num_queries
    mask.tril_(last)
    return mask if window is None else mask.triu_(last - (window - 1))


def _current_rows(steps: Sequence[Tensor], indices: Sequence[Tensor | None]) -> list[Tensor]:
    return [x if index is None else x[index] for x, index in zip(steps, indices, strict=True)]
