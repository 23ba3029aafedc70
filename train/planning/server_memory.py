"""Memory of one GPU that runs the target in vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from data.target.architecture import active_intermediate_size
from data.vllm.server_info import ROOM_TOKENS
from train.config.run import RunConfig
from train.planning.target import TargetSize

# Sequences of the greatest length that the cache of an engine must hold.
CAPTURED_SEQUENCES = 4
# The driver, NCCL and CUDA graphs of an engine. Not measured.
_FIXED_BYTES = 3_000_000_000
# vLLM's defaults for a server on GPUs of 70 to 160 GiB (vllm/engine/arg_utils.py).
_BATCHED_TOKENS, _BATCHED_SEQUENCES = 8192, 1024
_ITEMSIZE = 2


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

    def total(self, num_sequences: int) -> int:
        return self.weights + self.forward + self.fixed + self.sequence * num_sequences


def server_memory(
    config: RunConfig, target_config: PreTrainedConfig, size: TargetSize, parallel: Parallelism
) -> ServerMemory:
    """Return the memory of each GPU of a server.

    - Weights: tensor parallelism splits all of them. Every data-parallel engine holds a copy, except of
      routed experts: vLLM splits these over all GPUs of the server, with expert parallelism and without.
    - A sequence, per token: the keys and values of every layer, split over tensor-parallel GPUs by heads
      (not with latent attention, whose keys and values have no heads), and the hidden states of each
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
    logits = 4 * text.vocab_size * _BATCHED_SEQUENCES // parallel.tensor
    num_states = len(config.drafter.aux_layer_ids or (0, 1, 2)) + 1
    states = num_states * text.hidden_size * _ITEMSIZE * _layers_of_a_page(text)
    return ServerMemory(
        weights=weights,
        forward=_BATCHED_TOKENS * per_token * _ITEMSIZE + logits,
        fixed=_FIXED_BYTES,
        sequence=longest_sequence(config) * (_cached_bytes(text, parallel.tensor) + states),
    )


def longest_sequence(config: RunConfig) -> int:
    """Return the length of the longest sequence that the run sends to vLLM, in tokens.

    A regenerated sample is cut to `data.max_tokens` only after it is written.
    """
    regenerate = config.data.regenerate
    written = config.data.max_tokens + regenerate.max_new_tokens if regenerate.enabled else 0
    return max(config.train.row_tokens, written) + ROOM_TOKENS


def _cached_bytes(text: Any, tensor: int) -> int:
    """Return the bytes of one token's keys and values on each GPU."""
    latent = getattr(text, "kv_lora_rank", None)
    if latent is not None:
        return text.num_hidden_layers * (latent + text.qk_rope_head_dim) * _ITEMSIZE
    heads = max(1, getattr(text, "num_key_value_heads", text.num_attention_heads) // tensor)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers * 2 * heads * width * _ITEMSIZE


def _layers_of_a_page(text: Any) -> int:
    """Return how many layers share a page of the cache: 1, or the layers of the rarer kind of attention."""
    kinds = list(getattr(text, "layer_types", None) or [])
    return min(kinds.count(kind) for kind in set(kinds)) if len(set(kinds)) > 1 else 1
