"""RoPE's tables, and the scalings of which training, transformers and vLLM make the same ones."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle31.errors import UserError

# The keys that both read. "dynamic" and "longrope" are left out: there vLLM fixes for the whole server what
# transformers chooses by the length.
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
# With MLA vLLM takes every scaling for DeepSeek's YaRN, which has no other magnitude and no open range.
_LATENT_KEYS = {
    "default": (),
    "yarn": tuple(key for key in ROPE_KEYS["yarn"] if key not in ("attention_factor", "truncate")),
}
_REMEDY = "Set drafter.rope_parameters, such as {rope_type: default, rope_theta: 10000.0}."


def served_rope(rope_parameters: dict[str, Any], *, latent: bool) -> dict[str, Any]:
    """`rope_parameters` without the keys that neither training nor vLLM's drafter reads.

    Args:
        latent: for MLA.
    """
    rope_type = rope_parameters.get("rope_type", "default")
    keys = (_LATENT_KEYS if latent else ROPE_KEYS)[rope_type]
    given = {key: rope_parameters[key] for key in keys if rope_parameters.get(key) is not None}
    return {"rope_type": rope_type, "rope_theta": float(rope_parameters["rope_theta"]), **given}


def check_rope(rope_parameters: dict[str, Any], *, latent: bool) -> None:
    """Refuses what training and vLLM would compute differently.

    Raises:
        UserError: the scaling is none of those that both know, a scaled RoPE turns a part of each head only,
            or YaRN's keys for MLA are incomplete or mean different things to the two.
    """
    rope_type = rope_parameters.get("rope_type", "default")
    known = list(_LATENT_KEYS if latent else ROPE_KEYS)
    if rope_type not in known:
        raise UserError(
            "drafter.rope_parameters.rope_type",
            rope_type,
            f"vLLM's drafter would get other tables than training; known are {known}. {_REMEDY}",
        )
    partial = rope_parameters.get("partial_rotary_factor") or 1.0
    if rope_type != "default" and partial != 1.0:
        raise UserError(
            "drafter.rope_parameters.partial_rotary_factor", partial, f"Drafters turn whole heads. {_REMEDY}"
        )
    if latent and rope_type == "yarn":
        _check_latent_yarn(rope_parameters)


def _check_latent_yarn(rope_parameters: dict[str, Any]) -> None:
    for key in ("factor", "original_max_position_embeddings"):
        if rope_parameters.get(key) is None:
            raise UserError(f"drafter.rope_parameters.{key}", None, "vLLM's YaRN for MLA needs it.")
    both = [rope_parameters.get(key) for key in ("mscale", "mscale_all_dim")]
    if both != [None, None] and not all(both):
        remedy = (
            "Give both, other than 0, or neither: transformers and vLLM take one alone for different things."
        )
        raise UserError("drafter.rope_parameters.mscale, mscale_all_dim", both, remedy)
    for key, neutral in (("attention_factor", None), ("truncate", True)):
        value = rope_parameters.get(key)
        if value not in (None, neutral):
            raise UserError(f"drafter.rope_parameters.{key}", value, "vLLM's YaRN for MLA has no such key.")


def latent_score_factor(rope_parameters: dict[str, Any]) -> float:
    """What MLA's scores are multiplied with beside head_dim^-0.5: YaRN's temperature.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 3.1.4; `DeepseekV2MLAAttention` in vLLM's deepseek_v2.py.
    """
    all_dim = rope_parameters.get("mscale_all_dim")
    if rope_parameters.get("rope_type", "default") == "default" or not all_dim:
        return 1.0
    factor = rope_parameters["factor"]
    return (0.1 * all_dim * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


class Rotary:
    """RoPE's cos and sin in float32, with every scaling of `ROPE_KEYS`.

    Not a module: the tables must not follow the drafter's cast to bfloat16.

    Args:
        width: of the part of a head that is turned.
    """

    def __init__(self, width: int, rope_parameters: dict[str, Any], max_position_embeddings: int) -> None:
        self.config = LlamaConfig(
            head_dim=width,
            max_position_embeddings=max_position_embeddings,
            rope_parameters=dict(rope_parameters),
        )
        self.embedding: LlamaRotaryEmbedding | None = None

    def __call__(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [N] -> cos, sin float32 [N, width]."""
        if self.embedding is None or self.embedding.inv_freq.device != position_ids.device:
            # Built at first use: a drafter made on the meta device gets its tables on a real one.
            with torch.device(position_ids.device):
                self.embedding = LlamaRotaryEmbedding(self.config)
        probe = torch.empty(0, device=position_ids.device)
        cos, sin = self.embedding(probe, position_ids.unsqueeze(0))
        return cos.squeeze(0), sin.squeeze(0)
