"""The EAGLE 3.1 drafter, and EAGLE 3: hidden states recurse from step to step."""

import torch
from torch import Tensor, nn

from eagle31.kernels.elementwise import RMSNorm
from eagle31.kernels.plain_attention import Attend, LayerKeys
from eagle31.model.attention import Products
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter, Prefill


class EagleDrafter(Drafter):
    """A drafter of chains: each step reads the token before and the state of the step before.

    Training and `measure_drift` run `prefill` and `rollout_step`; decoding runs the same layers over a
    cache. What differs is passed in:

    - `tokens`: embeddings, or their products with the first layer's projections. A training step reads each
      token at up to K steps and computes its products once; decoding reads it once, and one product of the
      concatenated inputs is faster.
    - `attend`: training has many queries and needs gradients, so it merges a flash kernel's output with the
      rollout keys; decoding has one query, and building its scores is faster.
    - the rows: training drops rows from step to step; decoding adds them to a cache.
    """

    fc_norm: nn.ModuleList
    input_norm: RMSNorm

    def __init__(self, config: DrafterConfig, with_head: bool = True) -> None:
        width, eps = config.target_hidden_size, config.rms_norm_eps
        num_aux, norms = len(config.aux_layer_ids), dict[str, nn.Module]()
        if config.norm_before_fc:
            norms["input_norm"] = RMSNorm(num_aux * width, eps=eps)
        if config.fc_norm:
            norms["fc_norm"] = nn.ModuleList(RMSNorm(width, eps=eps) for _ in range(num_aux))
        super().__init__(config, with_head, norms, [layer == 0 for layer in range(config.num_hidden_layers)])

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        states = aux_hidden_states
        if self.config.norm_before_fc:
            states = self.input_norm(states.flatten(1)).view_as(states)
        if self.config.fc_norm:
            states = torch.stack([norm(states[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        return self.fc(states.flatten(1))

    def prefill(
        self, fused: Tensor, tokens: Tensor | Products, position_ids: Tensor, attend: Attend
    ) -> Prefill:
        """Return a draft's state and keys; see `Drafter`.

        In the last layer a row that is not rolled out needs only its key and value. Layers before the last
        feed its keys, so they compute every row.
        """
        rotation = self.rotary(position_ids)
        *before, last = self.decoder_layers
        state, keys = fused, []
        for layer in before:
            state, layer_keys = layer.step(state, tokens, rotation, LayerKeys, attend)
            keys.append(layer_keys)
        return Prefill(state, keys, last.compressed(state, tokens, rotation))

    @property
    def prefills_rows_alone(self) -> bool:
        return len(self.layers) == 1

    def head(self, frozen: nn.Linear | None) -> Tensor:
        return (frozen or self.lm_head).weight

    def rollout_step(
        self,
        step: int,
        state: Tensor,
        tokens: Tensor | Products,
        rotation: tuple[Tensor, Tensor],
        attend: Attend,
        keys: list[LayerKeys],
    ) -> tuple[Tensor, Tensor, list[LayerKeys]]:
        """Run a step of the rows that are rolled out.

        Args:
            state: [R, H], what the step before fed back; at step 0 that of `prefill`, which enters the last
                layer.
            tokens: the token that this step starts from, as embeddings [R, H] or as products.
            rotation: RoPE's cos and sin at the positions of this step, float32 [R, D] each.
            keys: each layer's keys and values before this step; at step 0 `step_keys`.

        Returns:
            The post-norm state that the head reads [R, H], the state that is fed back [R, H], and the keys
            with this step's.
        """
        if step == 0:
            output, _ = self.decoder_layers[-1].step(state, tokens, rotation, keys[-1], attend)
            return *self.final_states(output), keys
        extended = []
        for layer, before in zip(self.decoder_layers, keys, strict=True):
            state, layer_keys = layer.step(state, tokens, rotation, before.with_step, attend)
            extended.append(layer_keys)
        return *self.final_states(state), extended

    def final_states(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the head reads and what the next step receives, of the layers' output [N, H]."""
        normed = self.norm(output)
        return normed, normed if self.config.norm_output else output
