"""Decoding one sequence with the target and a key/value cache, with its hidden states."""

from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from data.target.modules import TargetModules, layer_inputs


class TargetDecoder:
    """A target with a key/value cache that returns logits and aux hidden states for appended tokens."""

    def __init__(
        self, model: PreTrainedModel, modules: TargetModules, aux_layer_ids: tuple[int, ...]
    ) -> None:
        self.model = model
        self.modules = modules
        self.aux_layer_ids = aux_layer_ids
        self.device = modules.embed_tokens.get_parameter("weight").device
        self.start()

    def start(self) -> None:
        """Start a new, empty sequence."""
        self.cache = DynamicCache(config=self.model.config)
        self.cache.activate_past_recording()
        self._token_ids = torch.empty(0, dtype=torch.int64)

    def rollback(self, num_tokens: int) -> None:
        """Drop all tokens after the first `num_tokens`, such as rejected drafts.

        A recurrent state has no earlier ones in it: a target with such layers reads the first tokens again.
        """
        excess, kept = len(self._token_ids) - num_tokens, self._token_ids[:num_tokens]
        if not getattr(self.modules.decoder, "_is_stateful", False):
            self.cache.crop(-excess)
            self._token_ids = kept
        elif excess:
            self.start()
            self.forward(kept)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Append int64 [n]; return logits [n, V] and aux hidden states [n, A, Ht] in the target's dtype."""
        self._token_ids = torch.cat([self._token_ids, token_ids.cpu()])
        states: dict[int, Tensor] = {}
        with layer_inputs(self.modules, [(i, partial(states.__setitem__, i)) for i in self.aux_layer_ids]):
            output = self.model(
                input_ids=token_ids.to(self.device)[None], past_key_values=self.cache, use_cache=True
            )
        aux = torch.stack([states[i][0].to(token_ids.device) for i in self.aux_layer_ids], dim=1)
        return output.logits[0].to(token_ids.device), aux
