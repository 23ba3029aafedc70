"""The target whose hidden states a run captures."""

from dataclasses import dataclass

from data.target.parts import TargetParts
from data.target.spec import TargetSpec
from data.vllm.client import ExpectedStates


@dataclass(frozen=True)
class CapturedTarget:
    """The frozen target, the few tensors of it that training needs, and the layers that are captured."""

    spec: TargetSpec
    parts: TargetParts
    aux_layer_ids: tuple[int, ...]

    @property
    def num_aux_layers(self) -> int:
        return len(self.aux_layer_ids)

    @property
    def mla(self) -> bool:
        """Whether the target has multi-head latent attention."""
        return getattr(self.parts.config.get_text_config(), "kv_lora_rank", None) is not None

    def expected_states(self) -> ExpectedStates:
        """Return what every engine that runs this target must deliver."""
        return ExpectedStates(
            target=self.spec.checkpoint.path,
            target_fingerprint=self.parts.fingerprint,
            aux_layer_ids=self.aux_layer_ids,
            hidden_size=self.parts.hidden_size,
            num_layers=self.parts.num_layers,
            dtype=self.parts.embed_tokens.dtype,
        )
