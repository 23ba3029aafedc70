"""What all drafters have in common. `EagleDrafter` and `DSparkDrafter` are the kinds.

The embedding is not part of a drafter: it is the target's, it is frozen, and the caller keeps it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from torch import Tensor, nn

from eagle31.kernels.elementwise import RMSNorm
from eagle31.kernels.plain_attention import Attend, LayerKeys
from eagle31.model.attention import Products
from eagle31.model.config import DrafterConfig
from eagle31.model.layer import DrafterLayer
from eagle31.model.rope import Rotary


class Prefill(NamedTuple):
    """What drafts read of N captured rows."""

    state: Tensor  # [N, W], what a draft starts from; W is 0 if it starts from a token alone
    keys: list[LayerKeys]  # of step 0, for each layer before the last
    compressed: tuple[Tensor, Tensor]  # of the last layer; `AttentionModule.expanded` reads it


class Drafter(nn.Module, ABC):
    """Fusion, decoder layers, final norm, and the draft head unless it is frozen and kept outside.

    Args:
        norms: those of `fuse`, by name.
        reads_embedding: for each layer, whether its attention reads embeddings next to the state.
    """

    def __init__(
        self,
        config: DrafterConfig,
        with_head: bool,
        norms: Mapping[str, nn.Module],
        reads_embedding: Sequence[bool],
    ) -> None:
        super().__init__()
        self.config = config
        for name, norm in norms.items():
            self.add_module(name, norm)
        width = len(config.aux_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(DrafterLayer(config, reads) for reads in reads_embedding)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if with_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rotary_width, config.rope_parameters, config.max_position_embeddings)

    @abstractmethod
    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Project the aux hidden states to the drafter's width, with its norms. [T, A, Ht] -> [T, H]."""

    @abstractmethod
    def prefill(
        self, fused: Tensor, tokens: Tensor | Products, position_ids: Tensor, attend: Attend
    ) -> Prefill:
        """Compute what drafts read of the captured rows.

        Args:
            fused: [N, H], fused states of the rows.
            tokens: the token that follows each row, as embeddings [N, H] or as products.
            position_ids: int64 [N], RoPE positions.
            attend: attention of all rows, where a layer's keys depend on other rows.
        """

    @property
    @abstractmethod
    def prefills_rows_alone(self) -> bool:
        """Whether what drafts read of a captured row is a function of this row alone."""

    @abstractmethod
    def head(self, frozen: nn.Linear | None) -> Tensor:
        """Return the matrix [Vd, W] from what a rollout yields to logits.

        Args:
            frozen: the draft head, if it is not trained.
        """

    def step_keys(self, prefilled: Prefill) -> list[LayerKeys]:
        """Return each layer's step-0 keys and values."""
        last = self.decoder_layers[-1].self_attn
        return [*prefilled.keys, LayerKeys(*last.expanded(prefilled.compressed))]

    @property
    def decoder_layers(self) -> list[DrafterLayer]:
        """Return `layers` with its element type."""
        return cast(list[DrafterLayer], list(self.layers))
