"""What a drafter is: its shape, its norms, the target it reads."""

from dataclasses import dataclass, field
from typing import Any

from eagle31.errors import UserError

ARCHITECTURE = "LlamaForCausalLMEagle3"

# The scalings whose tables vLLM computes as transformers does, and the keys that both read. "dynamic" and
# "longrope" are left out: there vLLM fixes for the whole server what transformers chooses by the length.
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter with grouped-query attention, EAGLE 3.1 by default.

    EAGLE 3 is `fc_norm=False, norm_output=False`.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]  # decoder layers already applied: 0 is the embedding's output
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 2048
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise UserError(f"drafter.{name}", getattr(self, name), "It must be at least 1.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                "drafter.num_key_value_heads",
                self.num_key_value_heads,
                f"It must divide num_attention_heads ({self.num_attention_heads}).",
            )
        if self.head_dim % 2:
            raise UserError("drafter.head_dim", self.head_dim, "RoPE needs an even head_dim.")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise UserError(
                "drafter.draft_vocab_size",
                self.draft_vocab_size,
                f"It must lie between 1 and the target's vocabulary ({self.vocab_size}); null takes all.",
            )
        if not self.aux_layer_ids or list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)):
            raise UserError(
                "drafter.aux_layer_ids",
                list(self.aux_layer_ids),
                "Give at least one id, ascending, each once: vLLM sorts and deduplicates them.",
            )
        check_rope(self.rope_parameters)

    @property
    def served_rope(self) -> dict[str, Any]:
        """`rope_parameters` without the keys that neither training nor vLLM's drafter reads."""
        rope_type = self.rope_parameters.get("rope_type", "default")
        given = {k: self.rope_parameters[k] for k in ROPE_KEYS[rope_type] if k in self.rope_parameters}
        return {"rope_type": rope_type, "rope_theta": self.rope_theta, **given}

    @property
    def rope_theta(self) -> float:
        return float(self.rope_parameters["rope_theta"])

    @property
    def pruned(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.vocab_size

    def to_json(self, dtype: str) -> dict[str, Any]:
        """`config.json` as vLLM reads it (vllm/model_executor/models/llama_eagle3.py).

        Args:
            dtype: of the exported weights, such as "bfloat16".
        """
        # The older spelling: vLLM, transformers 4 and 5 and SGLang all read it.
        rope_scaling = {k: v for k, v in self.served_rope.items() if k != "rope_theta"}
        scaled = rope_scaling["rope_type"] != "default"
        ids = list(self.aux_layer_ids)
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_scaling if scaled else None,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "num_aux_hidden_states": len(ids),
            "eagle_aux_hidden_state_layer_ids": ids,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "norm_before_residual": self.norm_before_residual,
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "torch_dtype": dtype,
        }


def check_rope(rope_parameters: dict[str, Any]) -> None:
    """Refuses what training and vLLM would compute differently.

    Raises:
        UserError: the scaling is none of `ROPE_KEYS`, or a scaled RoPE turns a part of each head only.
    """
    remedy = "Set drafter.rope_parameters, such as {rope_type: default, rope_theta: 10000.0}."
    rope_type = rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_KEYS:
        raise UserError(
            "drafter.rope_parameters.rope_type",
            rope_type,
            f"vLLM's drafter would get other tables than training; known are {list(ROPE_KEYS)}. {remedy}",
        )
    partial = rope_parameters.get("partial_rotary_factor") or 1.0
    if rope_type != "default" and partial != 1.0:
        raise UserError(
            "drafter.rope_parameters.partial_rotary_factor", partial, f"Drafters turn whole heads. {remedy}"
        )
