"""The shapes at which training steps are timed: drafters, and the documents that fill the rows."""

from dataclasses import asdict, dataclass
from typing import Any

from eagle31.model.config import DrafterConfig

AUX_LAYER_IDS = (2, 8, 13)


@dataclass(frozen=True)
class Shape:
    """A drafter, its target's sizes, and the rows of one step."""

    name: str
    content: str  # what fills the rows: "chat", "long prompt", "answers only" or "one long chat"
    row_tokens: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    num_steps: int = 7
    step_decay: float = 0.8

    def config(self) -> DrafterConfig:
        """Return an EAGLE 3.1 drafter that is as wide as its target, which speculators requires."""
        return DrafterConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            target_hidden_size=self.hidden_size,
            aux_layer_ids=AUX_LAYER_IDS,
            max_position_embeddings=max(2048, self.row_tokens + 64),
        )

    def llama_config(self) -> dict[str, Any]:
        """Return the arguments of transformers' LlamaConfig for the peers' decoder layer."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.row_tokens + 64,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """Return one line for the heading of the table."""
        return (
            f"hidden {self.hidden_size}, heads {self.num_attention_heads}/{self.num_key_value_heads}, "
            f"intermediate {self.intermediate_size}, vocabulary {self.vocab_size:,}, draft vocabulary "
            f"{self.draft_vocab_size:,}, {self.num_steps} steps"
        )


_MEDIUM: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 32_768,
    "draft_vocab_size": 8192,
}
_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 8192,
    "draft_vocab_size": 2048,
}
LARGE: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "draft_vocab_size": 32_000,
}
SHAPES = {
    "A": Shape("A", "chat", 2048, **_MEDIUM),
    "B": Shape("B", "long prompt", 4096 + 256, **_MEDIUM),
    "C": Shape("C", "answers only", 512, **_SMALL),
}
GPU_SHAPES = {
    "D8k": Shape("D8k", "chat", 8192, **LARGE),
    "D64k": Shape("D64k", "chat", 65_536, **LARGE),
}


def memory_shape(row_tokens: int, num_steps: int, vocab_size: int) -> Shape:
    """Return a shape for peak memory; its single document per row shows any quadratic growth."""
    sizes = _SMALL | {"vocab_size": vocab_size, "draft_vocab_size": vocab_size // 4}
    return Shape("memory", "one long chat", row_tokens, **sizes, num_steps=num_steps)
