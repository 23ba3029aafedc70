"""The frozen target of a run."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.cache import cache_directory
from data.conversations.template import template_fingerprint
from data.embedded.target import EmbeddedTarget, ensure_embedded_target
from data.target.parts import TargetParts, load_target_parts
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer
from train.config.target import EMBEDDED, TargetConfig


@dataclass
class Target:
    """The target that the settings name. What is expensive is made at first use and kept."""

    settings: TargetConfig
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    progress: bool = False  # whether training the embedded target shows its progress

    @cached_property
    def embedded(self) -> EmbeddedTarget:
        """The embedded target and its conversations, trained at first use on this machine."""
        return ensure_embedded_target(cache_directory() / EMBEDDED, progress=self.progress)

    @cached_property
    def spec(self) -> TargetSpec:
        target = self.settings
        return TargetSpec(
            model=str(self.embedded.model) if target.model == EMBEDDED else target.model,
            revision=target.revision,
            dtype=target.dtype,
            trust_remote_code=target.trust_remote_code,
            attn_implementation=target.attn_implementation,
            device_map=target.device_map,
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.spec, self.settings.chat_template)

    @property
    def template_fingerprint(self) -> str:
        """The fingerprint of the chat template with its arguments."""
        return template_fingerprint(self.tokenizer, self.template_kwargs)

    @cached_property
    def parts(self) -> TargetParts:
        return load_target_parts(self.spec)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion."""
        ids = set(self.parts.eos_token_ids)
        if self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        return tuple(sorted(ids))

    def located(self, source: str, evaluation: bool) -> str:
        """Return a source of conversations, or the path of the embedded target's."""
        if source != EMBEDDED:
            return source
        return str(self.embedded.held_out if evaluation else self.embedded.train)
