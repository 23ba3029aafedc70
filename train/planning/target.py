"""The target in the plan, from its config alone: parameters, memory, and how it is split for capture."""

import os
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
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import RunConfig
from train.config.target import EMBEDDED, TargetConfig

_DEFAULT_BYTES = 2  # of a parameter, if the config has no dtype


@dataclass(frozen=True)
class TargetSize:
    """The target's weights."""

    parameters: ParameterCounts
    checkpoint_bytes: int
    expert_bytes: int  # of the checkpoint, in routed experts


@dataclass(frozen=True)
class TargetPlan:
    """The target's weights and the GPUs that hold them during capture."""

    parameters: ParameterCounts
    checkpoint_bytes: int
    num_gpus: int  # over all replicas
    gpus_per_replica: int
    split: str  # in words

    @property
    def bytes_per_gpu(self) -> int:
        """Bytes of weights; the key-value cache and activations use the rest of the GPU."""
        return self.checkpoint_bytes // self.gpus_per_replica

    @property
    def num_replicas(self) -> int:
        return max(1, self.num_gpus // self.gpus_per_replica)


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


def target_plan(config: RunConfig, target: PreTrainedConfig, num_gpus: int) -> TargetPlan:
    """Return how the target is placed on GPUs.

    Args:
        target: the target's config.
        num_gpus: number of GPUs that train; the target shares them unless plan.target_gpus is set.
    """
    parameters = count_parameters(target)
    target_gpus = config.plan.target_gpus or num_gpus
    per_replica, split = _split(config, target_gpus)
    return TargetPlan(
        parameters=parameters,
        checkpoint_bytes=_checkpoint_bytes(config.target, target, parameters),
        num_gpus=target_gpus,
        gpus_per_replica=per_replica,
        split=split,
    )


def shares_gpus(config: RunConfig) -> bool:
    """Whether the target is on the training GPUs while the drafter is trained."""
    online = config.capture.mode is CaptureMode.online
    return online and config.capture.source is CaptureSource.hf


def _split(config: RunConfig, num_gpus: int) -> tuple[int, str]:
    capture = config.capture
    if capture.source is CaptureSource.hf:
        if config.target.device_map is not None:
            per_node = min(num_gpus, max(1, int(os.environ.get("LOCAL_WORLD_SIZE", num_gpus))))
            return per_node, f"transformers, spread over the {per_node} GPUs of a node"
        return 1, "transformers, a copy on every GPU"
    if capture.source is CaptureSource.torchspec:
        return num_gpus, f"TorchSpec's engines on {num_gpus} GPUs"
    arguments = config.vllm.engine_args
    tensor = int(arguments.get("tensor_parallel_size", 1))
    per_replica = tensor * int(arguments.get("pipeline_parallel_size", 1))
    replicas = max(1, num_gpus // per_replica)
    servers = f"{replicas} server{'s' if replicas > 1 else ''}"
    return per_replica, f"vLLM, {servers} of {per_replica} GPUs each"


def _checkpoint_bytes(target: TargetConfig, config: PreTrainedConfig, parameters: ParameterCounts) -> int:
    if target.checkpoint_gb is not None:
        return int(target.checkpoint_gb * 1e9)
    path = Path(target.model).expanduser()
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    dtype = target.dtype if target.dtype != "auto" else (config.dtype or config.get_text_config().dtype)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return parameters.total * (dtype.itemsize if isinstance(dtype, torch.dtype) else _DEFAULT_BYTES)
