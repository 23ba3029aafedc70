"""The target whose hidden states a run captures, and the vLLM engine that captures them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.capture.vllm.arguments import CaptureEngine
from data.capture.vllm.client import ExpectedStates
from data.target.parts import TargetParts
from data.target.spec import TargetSpec


@dataclass(frozen=True)
class CapturedTarget:
    """The frozen target, the few tensors of it that training needs, and the layers that are captured."""

    spec: TargetSpec
    parts: TargetParts
    aux_layer_ids: tuple[int, ...]

    @property
    def num_aux_layers(self) -> int:
        return len(self.aux_layer_ids)

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

    def vllm_engine(
        self,
        engine_args: Mapping[str, Any],
        *,
        max_tokens: int,
        roots: list[str],
        mooncake_masters: list[str],
    ) -> CaptureEngine:
        """Return the engine that captures the target's states, and writes its completions.

        Args:
            engine_args: further arguments of `vllm.LLM`, such as the recipe's `vllm.engine_args`.
            max_tokens: length of the longest sample, and of the longest prompt with its completion.
            roots: the directories below which the engine may write.
            mooncake_masters: the Mooncake stores that it may put into, as host:port.
        """
        return CaptureEngine(
            target=self.spec.checkpoint.path,
            revision=self.spec.revision,
            dtype=str(self.parts.embed_tokens.dtype).removeprefix("torch."),
            trust_remote_code=self.spec.trust_remote_code,
            target_fingerprint=self.parts.fingerprint,
            aux_layer_ids=self.aux_layer_ids,
            num_layers=self.parts.num_layers,
            max_tokens=max_tokens,
            roots=roots,
            mla=getattr(self.parts.config.get_text_config(), "kv_lora_rank", None) is not None,
            mooncake_masters=mooncake_masters,
            extra=engine_args,
        )
