"""What follows from a target's config without its weights: parameter counts and feed-forward widths."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from data.target.modules import locate
from eagle31.errors import UserError

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
_UNCACHED_LAYERS = ("linear_attention", "moe", "mlp")  # of the types in transformers' layer_types


@dataclass(frozen=True)
class ParameterCounts:
    """The number of parameters of a target."""

    total: int
    active: int  # used in one token's matrix products; the embedding is looked up and not counted
    experts: int  # of the total, in routed experts


def from_architecture(architecture: Mapping[str, Any]) -> PreTrainedConfig:
    """Build a config from these keys of a config.json; the others have transformers' defaults.

    Raises:
        UserError: transformers does not know the model type or refuses a value.
    """
    keys = copy.deepcopy(dict(architecture))  # transformers writes into the rope parameters
    model_type = keys.pop("model_type", None)
    try:
        return AutoConfig.for_model(model_type, **keys)
    except Exception as error:  # strict configs raise exceptions of several types
        reason = " ".join(str(error).split())[:300]
        remedy = f"transformers cannot build a config of this type: {reason}"
        raise UserError("target.architecture.model_type", model_type, remedy) from error


def active_intermediate_size(config: PreTrainedConfig) -> int | None:
    """Return the width of the feed-forward network that one token uses.

    In a mixture of experts it is the sum over the experts that a token is routed to and the shared experts: a
    drafter as wide as a single expert is too narrow for such a target. The width is None if the config does
    not determine it.
    """
    text_config = config.get_text_config()
    dense = getattr(text_config, "intermediate_size", None)
    if not is_mixture(text_config):
        return dense
    chosen = _first(text_config, _EXPERTS_PER_TOKEN)
    width = getattr(text_config, "moe_intermediate_size", None) or dense
    if chosen is None or width is None:
        return None
    shared = _first(text_config, _SHARED_WIDTHS)
    if shared is None:
        shared = (getattr(text_config, "n_shared_experts", None) or 0) * width
    return chosen * width + shared


def has_latent_attention(config: PreTrainedConfig) -> bool:
    """Return whether the target has multi-head latent attention."""
    return getattr(config.get_text_config(), "kv_lora_rank", None) is not None


def attends_to_blocks(config: PreTrainedConfig) -> bool:
    """Return whether layers attend to blocks of positions, counted from the row's first, padding included."""
    text_config = config.get_text_config()
    kinds = getattr(text_config, "layer_types", None) or []
    compressed = any("compressed" in kind for kind in kinds)  # DeepSeek V4
    return compressed or getattr(text_config, "index_block_size", None) is not None  # MiniMax M3


def has_residual_streams(config: PreTrainedConfig) -> bool:
    """Return whether the target has several residual streams (hyper-connections)."""
    return getattr(config.get_text_config(), "hc_mult", 1) > 1


def first_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the text config, with the heads of the first layer where those of other layers differ."""
    text_config = config.get_text_config()
    return text_config.per_layer_config[0] if text_config.is_heterogeneous else text_config


def head_width(config: PreTrainedConfig) -> int | None:
    """Return the width of a head of the first layer that the config states."""
    text_config = first_layer(config)
    # transformers' head_dim of a target with latent attention is the width of the part with RoPE.
    return text_config.v_head_dim if has_latent_attention(config) else getattr(text_config, "head_dim", None)


def cached_elements(config: PreTrainedConfig, num_parts: int) -> int:
    """Return the elements of one token's keys and values, over all layers, in one of the parts of the cache.

    Tensor parallelism divides the heads, not the latent, which all heads read. Linear attention keeps nothing
    for each token; other layers count as the first.
    """
    text_config = first_layer(config)
    if has_latent_attention(config):
        width = text_config.kv_lora_rank + text_config.qk_rope_head_dim
    else:
        num_heads = getattr(text_config, "num_key_value_heads", text_config.num_attention_heads)
        each = head_width(config) or text_config.hidden_size // text_config.num_attention_heads
        width = 2 * max(1, num_heads // num_parts) * each
    return len(_cached_layers(text_config)) * width


def attention_flops(config: PreTrainedConfig, num_tokens: int) -> int:
    """Return the FLOPs of attention's scores and sums over all layers, in one forward pass of a sequence.

    A layer reads the keys of its sliding window, or as many as its index chooses. Linear attention is not
    counted; other layers count as the first.
    """
    text_config = first_layer(config)
    num_heads = text_config.num_attention_heads
    value_width = head_width(config) or text_config.hidden_size // num_heads
    key_width = value_width
    if has_latent_attention(config):
        key_width = text_config.qk_nope_head_dim + text_config.qk_rope_head_dim
    windows = {"sliding_attention": getattr(text_config, "sliding_window", None)}
    chosen = getattr(text_config, "index_topk", None)
    pairs = 0
    for kind in _cached_layers(text_config):
        most = min(num_tokens, windows.get(kind, chosen) or num_tokens)  # keys of a query
        pairs += most * (most + 1) // 2 + most * (num_tokens - most)
    return 2 * num_heads * (key_width + value_width) * pairs


def _cached_layers(text_config: PreTrainedConfig) -> list[str]:
    """Return the kind of each layer that has keys and values of every token; full_attention if unknown."""
    types = getattr(text_config, "layer_types", None) or ["full_attention"] * text_config.num_hidden_layers
    return [kind for kind in types if kind not in _UNCACHED_LAYERS]


def is_mixture(config: PreTrainedConfig) -> bool:
    """Return whether the model is a mixture of experts."""
    return (_first(config.get_text_config(), _NUM_EXPERTS) or 0) > 1


def model_class(config: PreTrainedConfig) -> Any:
    """Return the transformers auto class that builds models of this config."""
    known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def count_parameters(config: PreTrainedConfig) -> ParameterCounts:
    """Count the parameters of a model that is built on the meta device, without memory.

    Raises:
        UserError: transformers does not implement the architecture.
    """
    try:
        with torch.device("meta"):
            model = model_class(config).from_config(config)
    except ValueError as error:
        remedy = f"transformers cannot build this model: {' '.join(str(error).split())[:300]}"
        raise UserError("target.architecture.model_type", config.model_type, remedy) from error
    text_config = config.get_text_config()
    num_experts, chosen = _first(text_config, _NUM_EXPERTS) or 1, _first(text_config, _EXPERTS_PER_TOKEN) or 1
    modules = locate(model)
    computing = nn.ModuleList([modules.layers, modules.final_norm, modules.lm_head])
    counts = {name: parameter.numel() for name, parameter in computing.named_parameters()}
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    active = sum(counts.values()) - experts + experts * chosen // num_experts
    return ParameterCounts(model.num_parameters(), active, experts)


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
