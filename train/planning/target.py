"""The target in the plan, from its config alone: parameters and bytes."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from data.target.architecture import (
    ParameterCounts,
    check_architecture,
    count_parameters,
    from_architecture,
)
from data.target.loading import load_cached_config, load_config
from data.target.spec import TargetSpec
from train.config.target import EMBEDDED, TargetConfig

_DEFAULT_BYTES = 2  # of a parameter, if the config has no dtype


@dataclass(frozen=True)
class TargetSize:
    """The target's weights."""

    parameters: ParameterCounts
    checkpoint_bytes: int
    expert_bytes: int  # of the checkpoint, in routed experts


def planned_config(target: TargetConfig) -> PreTrainedConfig:
    """Return the config.json on this machine, else the recipe's target.architecture, else the Hub's.

    Raises:
        UserError: the recipe and config.json differ, or there is neither.
    """
    architecture = target.architecture
    if target.model == EMBEDDED:
        return from_architecture(architecture)
    spec = TargetSpec(target.model, target.revision, trust_remote_code=target.trust_remote_code)
    found = load_cached_config(spec)
    if found is None:
        return from_architecture(architecture) if architecture else load_config(spec)
    check_architecture(architecture, found)
    return found


def target_size(target: TargetConfig, config: PreTrainedConfig) -> TargetSize:
    """Return the size of the weights, as the checkpoint has them: quantization by vLLM is not counted.

    In a quantized checkpoint the experts are quantized and the rest has at least 16 bits per parameter.

    Args:
        config: the target's config.
    """
    parameters = count_parameters(config)
    size = _checkpoint_bytes(target, config, parameters)
    others = parameters.total - parameters.experts
    other_bytes = max(others * _DEFAULT_BYTES, size * others // parameters.total)
    return TargetSize(parameters, size, max(0, size - other_bytes) if parameters.experts else 0)


def _checkpoint_bytes(target: TargetConfig, config: PreTrainedConfig, parameters: ParameterCounts) -> int:
    if target.checkpoint_gb is not None:
        return int(target.checkpoint_gb * 1e9)
    path = Path(target.model).expanduser()
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    dtype = target.dtype if target.dtype != "auto" else (config.dtype or config.get_text_config().dtype)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return parameters.total * (dtype.itemsize if isinstance(dtype, torch.dtype) else _DEFAULT_BYTES)
