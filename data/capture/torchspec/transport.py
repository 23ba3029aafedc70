"""TorchSpec's store as a transport."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from data.capture.transport.mooncake import MooncakeTransport
from data.capture.transport.mooncake_store import MooncakeSettings
from data.capture.transport.protocol import StateRequest
from data.samples import CapturedSample
from eagle31.errors import UserError

DTYPE = torch.bfloat16  # of all states in the store


class TorchSpecTransport(MooncakeTransport):
    """The trainer's side of a store into which TorchSpec's engines put states, under keys that they choose.

    Args:
        norm_scale: the weight [Ht] of the target's final norm, if the engines put final states after it; None
            if they put them before it. Such states are divided by it. The norm of the result is the state
            that was put, and the norm is what every reader of a final state computes first.
    """

    def __init__(
        self, settings: MooncakeSettings, *, num_aux_layers: int, hidden_size: int, norm_scale: Tensor | None
    ) -> None:
        super().__init__(settings, num_aux_layers=num_aux_layers, hidden_size=hidden_size, dtype=DTYPE)
        self._scale = norm_scale
        self._chosen: dict[str, str] = {}  # the engines' keys by ours

    def announce(self, key: str, chosen: str) -> None:
        """Note the key under which an engine has put a sample."""
        if key in self._chosen:  # captured twice
            self.discard(key)
        self._chosen[key] = chosen

    def arrived(self, key: str) -> bool:
        return key in self._chosen and super().arrived(key)

    def discard(self, key: str) -> None:
        super().discard(key)
        self._chosen.pop(key, None)

    def _stored_key(self, key: str) -> str:
        return self._chosen.get(key, key)

    def _sample(self, request: StateRequest, aux: Tensor, ids: Tensor, final: Tensor) -> CapturedSample:
        sample = super()._sample(request, aux, ids, final)
        if self._scale is None:
            return sample
        states = sample.final_hidden_states.float() / self._scale
        # A weight of 0 leaves nothing to divide, and nothing of what is divided.
        return replace(sample, final_hidden_states=states.nan_to_num(0.0, 0.0, 0.0).to(DTYPE))


def norm_scale(norm: nn.Module, hidden_size: int) -> Tensor:
    """Return the scale of an RMSNorm, float32 [Ht], whatever it makes of its weight.

    Raises:
        UserError: it is another norm.
    """
    dtype = next(norm.parameters()).dtype
    states = torch.randn(2, hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        scale = norm(torch.ones(1, hidden_size, dtype=dtype))[0].float().clone()
        found, rms = norm(states).float(), states.float().pow(2).mean(-1, keepdim=True).sqrt()
    if not torch.allclose(found, states.float() / rms * scale, rtol=0.05, atol=0.05):
        remedy = "The engine gives states after the target's final norm, which is no RMSNorm; set vllm."
        raise UserError("torchspec.engine", "hf or sgl", remedy)
    return scale
