"""Published config.json files of EAGLE-3 drafters, understood as vLLM understands them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import DeepseekV2Config, DeepseekV3Config, LlamaConfig

from eagle31.errors import UserError
from eagle31.export.layouts import IDS, Layout, layer_config, layout_of
from eagle31.model.config import LATENT_ARCHITECTURE, DrafterConfig, MlaShape

# What vLLM 0.32 loads as `Eagle3LlamaForCausalLM`; it puts "Eagle3" before a bare LlamaForCausalLM itself.
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)
LATENT_ARCHITECTURES = (LATENT_ARCHITECTURE, "Eagle3DeepseekV3ForCausalLM")
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
_COMMON_KEYS = (
    *SHAPE_KEYS,
    *("num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
# Whose defaults vLLM takes for missing keys of a layer with MLA.
_LATENT_CONFIGS = {
    "kimi_k2": DeepseekV3Config,
    "deepseek_v3": DeepseekV3Config,
    "deepseek_v2": DeepseekV2Config,
}
_MLA_KEYS = tuple(field.name for field in fields(MlaShape))


@dataclass(frozen=True)
class ReadConfig:
    """A published config.json, understood."""

    config: DrafterConfig
    layout: Layout
    notes: tuple[str, ...]  # what was assumed, for a person


def read_config(
    raw: dict[str, Any],
    *,
    num_target_layers: int | None = None,
    aux_layer_ids: Sequence[int] | None = None,
) -> ReadConfig:
    """Understands a published config.json as vLLM does, its defaults for missing keys included.

    Args:
        num_target_layers: for checkpoints that leave the aux layer ids out, as vLLM then guesses from it.
        aux_layer_ids: in place of the checkpoint's own.

    Raises:
        UserError: a key is missing, or it describes what our drafter cannot represent.
    """
    layer = layer_config(raw)
    refuse_unknown_parts(raw, layer)
    missing = [key for key in SHAPE_KEYS if layer.get(key) is None]
    if missing:
        raise UserError("config.json", missing, "These keys are missing.")
    own = _transformers_config(layer)
    ids, notes = _aux_layer_ids(layer, num_target_layers, aux_layer_ids)
    mla, kv_heads, head_dim = _heads(layer, own)
    config = DrafterConfig(
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_hidden_layers=own.num_hidden_layers,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=own.rms_norm_eps,
        rope_parameters=dict(own.rope_parameters or {}),
        max_position_embeddings=own.max_position_embeddings,
        vocab_size=own.vocab_size,
        draft_vocab_size=layer.get("draft_vocab_size") or own.vocab_size,
        target_hidden_size=layer.get("target_hidden_size") or own.hidden_size,
        aux_layer_ids=ids,
        fc_norm=bool(layer.get("fc_norm", False)),
        norm_output=bool(layer.get("norm_output", False)),
        norm_before_residual=bool(layer.get("norm_before_residual", False)),
        mla=mla,
        bos_token_id=layer.get("bos_token_id"),
        eos_token_id=layer.get("eos_token_id"),
    )
    if layer.get("model_type") == "deepseek_v3":
        notes += ("model_type deepseek_v3: vLLM takes it for multi-token prediction and does not serve it.",)
    return ReadConfig(config, layout_of(raw), notes)


def is_latent(layer: dict[str, Any]) -> bool:
    """Whether a layer's config is of a drafter with MLA."""
    return next(iter(layer.get("architectures") or ()), None) in LATENT_ARCHITECTURES


def _transformers_config(layer: dict[str, Any]) -> Any:
    """The layer with the defaults that vLLM takes for missing keys, its RoPE in today's spelling.

    Raises:
        UserError: transformers does not understand it, or it is of a kind of MLA that our drafter is not.
    """
    kind: Any = LlamaConfig
    keys: tuple[str, ...] = (*_COMMON_KEYS, "head_dim")
    if is_latent(layer):
        kind, keys = _LATENT_CONFIGS.get(layer.get("model_type") or ""), (*_COMMON_KEYS, *_MLA_KEYS)
        if kind is None:
            remedy = f"Readable are {', '.join(_LATENT_CONFIGS)}."
            raise UserError("model_type", layer.get("model_type"), remedy)
        if layer.get("q_lora_rank", 0) is None:  # not missing: it says that queries have no latent
            raise UserError("q_lora_rank", None, "vLLM loads no such drafter, and ours has a latent.")
    given = {key: layer[key] for key in keys if layer.get(key) is not None}
    try:
        return kind(**given)
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError("config.json", "its layer", f"It can not be understood: {reason}") from error


def _heads(layer: dict[str, Any], own: Any) -> tuple[MlaShape | None, int, int]:
    """MLA's widths, the number of key heads, and the width of a query or key."""
    if not is_latent(layer):
        head_dim = layer.get("head_dim") or own.hidden_size // own.num_attention_heads
        return None, own.num_key_value_heads, head_dim
    mla = MlaShape(**{key: getattr(own, key) for key in _MLA_KEYS})
    return mla, own.num_attention_heads, mla.head_dim


def refuse_unknown_parts(raw: dict[str, Any], layer: dict[str, Any]) -> None:
    """Raises UserError for what a checkpoint has and our drafter has not, naming it."""
    eagle = layer.get("eagle_config") or {}
    if layout_of(raw) is Layout.vllm:
        architecture = next(iter(raw.get("architectures") or ()), None)
        readable = (*ARCHITECTURES, *LATENT_ARCHITECTURES)
        if architecture not in readable:
            raise UserError("architectures", architecture, f"Readable are {', '.join(readable)}.")
    else:
        model_type = layer.get("model_type", "llama")
        if model_type != "llama":
            raise UserError(
                "transformer_layer_config.model_type",
                model_type,
                "Only llama layers can be read; those of qwen3 have a q_norm and a k_norm, ours have not.",
            )
    unknown = {
        "norm_before_fc": eagle.get("norm_before_fc", layer.get("norm_before_fc", False)),
        "attention_bias": layer.get("attention_bias", False),
        "mlp_bias": layer.get("mlp_bias", False),
        "quantization_config": layer.get("quantization_config") or raw.get("quantization_config"),
        "logit_scale": layer.get("logit_scale", 1.0) != 1.0 and layer["logit_scale"],
        "eagle_config.use_aux_hidden_state=false": eagle.get("use_aux_hidden_state", True) is False,
        "hidden_act": layer.get("hidden_act", "silu") != "silu" and layer["hidden_act"],
        "mla_use_nope": layer.get("mla_use_nope", False),
        "index_topk": layer.get("index_topk"),
    }
    for name, value in unknown.items():
        if value:
            raise UserError(name, value, "A drafter with this can not be represented here.")


def vllm_default_ids(num_target_layers: int) -> tuple[int, ...]:
    """What vLLM takes for a checkpoint without ids (`get_eagle3_default_aux_hidden_state_layers`)."""
    return (2, num_target_layers // 2, num_target_layers - 3)


def stated_ids(layer: dict[str, Any]) -> tuple[int, ...]:
    """The aux layer ids of a layer's config as vLLM captures them: each once, ascending; maybe none."""
    return tuple(sorted(set(layer.get(IDS) or (layer.get("eagle_config") or {}).get(IDS) or ())))


def _aux_layer_ids(
    layer: dict[str, Any], num_target_layers: int | None, given: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    stated = stated_ids(layer)
    num_aux = layer.get("num_aux_hidden_states") or len(stated) or 3
    notes: tuple[str, ...] = ()
    if given is not None:
        ids = tuple(given)
    elif stated:
        ids = stated
        if num_target_layers and ids == tuple(i - 1 for i in vllm_default_ids(num_target_layers)):
            shifted = [i + 1 for i in ids]
            notes = (
                f"aux layer ids {list(ids)} look as if they count layer outputs, as SGLang does. They "
                f"are taken as vLLM takes them; if acceptance is low, try {shifted}.",
            )
    elif num_target_layers is None:
        raise UserError(
            IDS,
            None,
            "config.json has none; give those it was trained with as drafter.aux_layer_ids=[...] or "
            "--aux-layer-ids ...",
        )
    else:
        ids = vllm_default_ids(num_target_layers)
        notes = (f"config.json names no aux layer ids: vLLM's default {list(ids)} is taken.",)
    if len(ids) != num_aux:
        raise UserError(IDS, list(ids), f"The drafter reads {num_aux} hidden states (num_aux_hidden_states).")
    return ids, notes
