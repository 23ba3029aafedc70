"""The target in the plan, from its config alone: its size, and the memory of a GPU that runs it in vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from data.capture.vllm.server_info import ROOM_TOKENS
from data.target.architecture import (
    ParameterCounts,
    active_intermediate_size,
    cached_elements,
    count_parameters,
    from_architecture,
)
from data.target.loading import load_cached_config, load_config
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from train.config.run import RunConfig
from train.config.target import EMBEDDED, TargetConfig

ALONE_FRACTION = 0.9  # of a GPU, for a server that shares it with no training
_DEFAULT_BYTES = 2  # of a parameter, if the config has no dtype
# The cache of an engine must hold one sequence of the greatest length, and four where they have fewer tokens.
_CACHED_TOKENS, _CACHED_SEQUENCES = 65_536, 4
# The driver, NCCL and CUDA graphs of an engine. Not measured.
_FIXED_BYTES = 3_000_000_000
# vLLM's defaults for a server on GPUs of 70 to 160 GiB (vllm/engine/arg_utils.py).
_BATCHED_TOKENS, BATCHED_SEQUENCES = 8192, 1024
_ITEMSIZE = 2


@dataclass(frozen=True)
class TargetSize:
    """The target's weights."""

    parameters: ParameterCounts
    checkpoint_bytes: int
    expert_bytes: int  # of the checkpoint, in routed experts


def planned_config(target: TargetConfig) -> PreTrainedConfig:
    """Return the config.json on this machine, else the recipe's target.architecture, else the Hub's.

    Raises:
        UserError: there is none, or transformers cannot read them.
    """
    architecture = target.architecture
    if target.model == EMBEDDED:
        if not architecture:
            raise UserError(
                "target.model", EMBEDDED, "Its shape is in the quickstart: give recipe=quickstart."
            )
        return from_architecture(architecture)
    spec = TargetSpec(target.model, target.revision, trust_remote_code=target.trust_remote_code)
    found = load_cached_config(spec)
    if found is None:
        return from_architecture(architecture) if architecture else load_config(spec)
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
    return parameters.total * planned_dtype(target, config).itemsize


def planned_dtype(target: TargetConfig, config: PreTrainedConfig) -> torch.dtype:
    """Return the target's dtype: the given one, else the checkpoint's, and bfloat16 if that has none.

    Raises:
        UserError: the given one is none that a target could have.
    """
    given = TargetSpec(target.model, dtype=target.dtype).torch_dtype
    dtype = given or config.dtype or config.get_text_config().dtype or torch.bfloat16
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


@dataclass(frozen=True)
class Parallelism:
    """How the engines of one server are split over GPUs."""

    tensor: int
    data: int
    given: bool  # whether the recipe states the data-parallel size

    @property
    def gpus(self) -> int:
        return self.tensor * self.data

    @staticmethod
    def of(engine_args: Mapping[str, Any]) -> "Parallelism":
        names = ("data_parallel_size_local", "data_parallel_size")
        sizes = [int(engine_args[name]) for name in names if name in engine_args]
        return Parallelism(int(engine_args.get("tensor_parallel_size", 1)), [*sizes, 1][0], bool(sizes))


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on one GPU of a server."""

    weights: int
    forward: int  # activations and logits of the largest forward pass
    fixed: int  # driver, communication, CUDA graphs
    sequence: int  # keys, values and hidden states of one sequence of the greatest length
    least_sequences: float  # that the cache must hold

    def total(self, num_sequences: float) -> int:
        return self.weights + self.forward + self.fixed + int(self.sequence * num_sequences)

    @property
    def least(self) -> int:
        """The memory with which it works."""
        return self.total(self.least_sequences)


def server_memory(
    config: RunConfig, target_config: PreTrainedConfig, size: TargetSize, parallel: Parallelism
) -> ServerMemory:
    """Return the memory of each GPU of a server.

    - Weights: tensor parallelism splits all of them. Every data-parallel engine holds a copy, except of
      routed experts: vLLM splits these over all GPUs of the server, with expert parallelism and without.
    - A sequence, per token: the keys and values of every layer, and the hidden states of each
      captured layer, which every GPU holds. Layers with sliding windows are counted as full ones. In a
      target that mixes kinds of attention, vLLM gives the hidden states pages as large as those of all
      layers of a kind.
    - The forward pass: 12 vectors of the hidden size and 3 of the feed-forward width per token in 16 bits,
      and float32 logits of every sequence in a batch. These are estimates.

    Source: vllm/v1/core/kv_cache_utils.py, vllm/model_executor/models/extract_hidden_states.py.
    """
    text = target_config.get_text_config()
    experts = size.expert_bytes // parallel.gpus
    weights = (size.checkpoint_bytes - size.expert_bytes) // parallel.tensor + experts
    width = active_intermediate_size(target_config) or text.hidden_size
    per_token = 12 * text.hidden_size + 3 * width // parallel.tensor
    logits = 4 * text.vocab_size * BATCHED_SEQUENCES // parallel.tensor
    cached = cached_elements(text, parallel.tensor) * _ITEMSIZE
    num_states = len(config.drafter.aux_layer_ids or (0, 1, 2)) + 1
    states = num_states * text.hidden_size * _ITEMSIZE * _layers_of_a_page(text)
    longest = longest_prompt(config) + ROOM_TOKENS
    return ServerMemory(
        weights=weights,
        forward=_BATCHED_TOKENS * per_token * _ITEMSIZE + logits,
        fixed=_FIXED_BYTES,
        sequence=longest * (cached + states),
        least_sequences=max(1, min(_CACHED_SEQUENCES, _CACHED_TOKENS / longest)),
    )


def longest_prompt(config: RunConfig) -> int:
    """Return the most tokens that a prompt has with its completion.

    A sample fits a row, and so does a held-out prompt with its completion. A regenerated sample is cut to
    `data.max_tokens` only after it is written.
    """
    regenerate = config.data.regenerate
    written = config.data.max_tokens + regenerate.max_new_tokens if regenerate.enabled else 0
    return max(config.train.row_tokens, written)


def _layers_of_a_page(text: Any) -> int:
    """Return how many layers share a page of the cache: 1, or the layers of the rarer kind of attention."""
    kinds = list(getattr(text, "layer_types", None) or [])
    return min(kinds.count(kind) for kind in set(kinds)) if len(set(kinds)) > 1 else 1
