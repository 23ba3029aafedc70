"""RoPE's tables, and the scalings for which training, transformers and vLLM compute the same tables.

Source: modeling_rope_utils.py of transformers 5, whose tables these are to the last bit.
"""

import math
from typing import Any

import torch
from torch import Tensor

from eagle31.errors import UserError

# The keys that training and vLLM read. "dynamic" and "longrope" are not supported: vLLM fixes for the whole
# server what transformers chooses by the sequence length.
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
_REQUIRED_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_POSITIVE_KEYS = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor"),
)
_REMEDY = "Set drafter.rope_parameters, such as {rope_type: default, rope_theta: 10000.0}."


def check_rope(rope_parameters: dict[str, Any], keys: dict[str, tuple[str, ...]]) -> None:
    """Check that training and vLLM compute the same tables.

    Args:
        keys: those that vLLM reads, by rope_type.

    Raises:
        UserError: the scaling is not one that both support, its keys are incomplete, or a scaled RoPE rotates
            only a part of each head.
    """
    rope_type = rope_parameters.get("rope_type", "default")
    if rope_type not in keys:
        raise UserError(
            "drafter.rope_parameters.rope_type",
            rope_type,
            f"vLLM's drafter would use other tables than training; supported are {list(keys)}. {_REMEDY}",
        )
    partial = rope_parameters.get("partial_rotary_factor") or 1.0
    if rope_type != "default" and partial != 1.0:
        raise UserError(
            "drafter.rope_parameters.partial_rotary_factor",
            partial,
            f"Drafters rotate whole heads. {_REMEDY}",
        )
    for key in ("rope_theta", *_REQUIRED_KEYS[rope_type]):
        if rope_parameters.get(key) is None:
            raise UserError(f"drafter.rope_parameters.{key}", None, f"It is required. {_REMEDY}")
    for key in ("rope_theta", *_POSITIVE_KEYS):
        value = rope_parameters.get(key)
        if value is not None and not _is_positive(value):
            raise UserError(f"drafter.rope_parameters.{key}", value, "Give a number greater than 0.")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


class Rotary:
    """RoPE's cos and sin in float32, with every scaling of `ROPE_KEYS`.

    It is not a module, because the tables must not follow the drafter's cast to bfloat16.

    Args:
        width: of the rotated part of a head.
        max_position_embeddings: stands in for a missing `original_max_position_embeddings`.
    """

    def __init__(self, width: int, rope_parameters: dict[str, Any], max_position_embeddings: int) -> None:
        self.width = width
        self.parameters = {"original_max_position_embeddings": max_position_embeddings, **rope_parameters}
        self.frequencies: Tensor | None = None  # float32 [width / 2]
        self.attention_factor = 1.0

    def __call__(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin. int64 [N] -> float32 [N, width] each."""
        if self.frequencies is None or self.frequencies.device != position_ids.device:
            # Built at the first use: a drafter made on the meta device gets its tables on a real one.
            tables = _tables(self.width, self.parameters, position_ids.device)
            self.frequencies, self.attention_factor = tables
        angles = position_ids.unsqueeze(1).float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def _tables(width: int, parameters: dict[str, Any], device: torch.device) -> tuple[Tensor, float]:
    """Return the frequencies, float32 [width / 2], and the factor of cos and sin."""
    exponents = torch.arange(0, width, 2, device=device).float() / width
    periods = parameters["rope_theta"] ** exponents
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "linear":
        return (1.0 / periods).div_(parameters["factor"]), 1.0
    if rope_type == "llama3":
        return _llama3_frequencies(1.0 / periods, parameters), 1.0
    if rope_type == "yarn":
        return _yarn_frequencies(periods, width, parameters), _yarn_attention_factor(parameters)
    return 1.0 / periods, 1.0


def _llama3_frequencies(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between the two."""
    factor, length = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    is_low, is_high = wavelengths > length / low, wavelengths < length / high
    scaled = torch.where(is_low, frequencies / factor, frequencies)
    smooth = (length / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(is_low | is_high, scaled, between)


def _yarn_frequencies(periods: Tensor, width: int, parameters: dict[str, Any]) -> Tensor:
    """Interpolate low frequencies, keep high ones, with a linear ramp between the two.

    Source: YaRN (arXiv 2309.00071), section 3.2.
    """
    theta, length = parameters["rope_theta"], parameters["original_max_position_embeddings"]

    def dimension(num_rotations: float) -> float:
        """Return the dimension that makes this number of rotations over the original length."""
        return (width * math.log(length / (num_rotations * 2 * math.pi))) / (2 * math.log(theta))

    low: float = dimension(parameters.get("beta_fast") or 32)
    high: float = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    dimensions = torch.arange(width // 2, dtype=torch.float32, device=periods.device)
    kept = 1 - ((dimensions - low) / (high - low)).clamp(0, 1)
    return 1.0 / (parameters["factor"] * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_attention_factor(parameters: dict[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    factor = parameters["factor"]
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return YaRN's factor of queries and keys, a function of the scaling."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
