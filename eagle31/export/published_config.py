"""Published config.json files of EAGLE-3 drafters, read as vLLM reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle31.errors import UserError
from eagle31.export.config_json import (
    DEEPSPEC,
    FLAGS,
    FORMATS,
    NUMBERS,
    SHAPE_KEYS,
    SLIDING,
    TOKEN_IDS,
    AttentionFormat,
)
from eagle31.export.layouts import DFLASH, DSPARK, IDS, Layout, layer_config, layout_of
from eagle31.model.config import DrafterConfig, DSparkShape
from eagle31.model.shapes import AttentionShape, MlaShape

# What vLLM reads as the rotated part of each head, at the top level or among RoPE's parameters.
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction", "rope_dim")


@dataclass(frozen=True)
class ReadConfig:
    """A drafter's configuration, read from a published config.json."""

    config: DrafterConfig
    layout: Layout
    notes: tuple[str, ...]  # assumptions, for the user


def read_config(
    raw: dict[str, Any],
    *,
    num_target_layers: int | None = None,
    aux_layer_ids: Sequence[int] | None = None,
) -> ReadConfig:
    """Read a published config.json as vLLM does, with its defaults for missing keys.

    Args:
        num_target_layers: used for checkpoints without aux layer ids, which vLLM derives from it.
        aux_layer_ids: replace the checkpoint's.

    Raises:
        UserError: a key is missing, or the drafter has parts that are not supported here.
    """
    try:
        return _read_config(raw, num_target_layers, aux_layer_ids)
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        remedy = f"A value of it has a type or a size that no drafter has ({error}); download it again."
        raise UserError("config.json", "damaged", remedy) from error


def _read_config(
    raw: dict[str, Any], num_target_layers: int | None, aux_layer_ids: Sequence[int] | None
) -> ReadConfig:
    layer = layer_config(raw)
    attention = _attention_kind(layer)
    _refuse_unknown_parts(raw, layer)
    if attention is MlaShape:
        _check_latent(layer)
    values = _numbers(layer, FORMATS[attention])
    ids, notes = _aux_layer_ids(layer, num_target_layers, aux_layer_ids)
    window, window_notes = _sliding_window(layer, values["num_hidden_layers"], attention)
    notes += window_notes
    same: dict[str, Any] = {key: layer.get(key) for key in TOKEN_IDS}
    same |= {flag: bool(layer.get(flag)) for flag in FLAGS}
    if "norm_before_fc" in (inner := layer.get("eagle_config") or {}):
        same["norm_before_fc"] = bool(inner["norm_before_fc"])
    config = DrafterConfig(
        **{key: values[key] for key in (*SHAPE_KEYS, *NUMBERS)},
        **_attention_heads(attention, layer),
        rope_parameters=_rope_parameters(layer, values["max_position_embeddings"]),
        sliding_window=window,
        draft_vocab_size=layer.get("draft_vocab_size") or values["vocab_size"],
        target_hidden_size=layer.get("target_hidden_size") or values["hidden_size"],
        aux_layer_ids=ids,
        dspark=_dspark(layer),
        **same,
    )
    if layer.get("model_type") == "deepseek_v3":
        notes += ("model_type deepseek_v3: vLLM reads it as multi-token prediction and does not serve it.",)
    if DEEPSPEC in layer["architectures"]:
        notes += (f"architecture {DEEPSPEC}: vLLM does not serve it before eagle31 has exported it again.",)
    if layer.get("enable_confidence_head"):
        notes += ("its confidence head is left out, which vLLM reads for adaptive verification alone.",)
    return ReadConfig(config, layout_of(raw), notes)


def _attention_kind(layer: dict[str, Any]) -> type[AttentionShape]:
    """Return the kind of attention that a layer's config describes.

    Raises:
        UserError: vLLM has no such EAGLE-3 drafter, or it is not supported here.
    """
    architecture = next(iter(layer.get("architectures") or ()), None)
    for kind, found in FORMATS.items():
        if architecture in found.architectures:
            return kind
    supported = [name for found in FORMATS.values() for name in found.architectures]
    raise UserError("architectures", architecture, f"No known drafter; give one of {', '.join(supported)}.")


def _check_latent(layer: dict[str, Any]) -> None:
    """Raise UserError for keys of latent attention that are not supported here."""
    types = FORMATS[MlaShape].model_types
    if layer.get("model_type") not in types:
        raise UserError("model_type", layer.get("model_type"), f"Supported are {', '.join(types)}.")
    if layer.get("q_lora_rank", 0) is None:  # not missing: it says that queries have no latent
        raise UserError("q_lora_rank", None, "Drafters whose queries have no latent are not supported.")


def _attention_heads(kind: type[AttentionShape], layer: dict[str, Any]) -> dict[str, Any]:
    """Return `attention`, `num_key_value_heads` and `head_dim` of a `DrafterConfig`."""
    num_heads, width = layer["num_attention_heads"], layer["hidden_size"]
    if issubclass(kind, MlaShape):
        shape = kind(**{name: layer[name] for name in kind.widths()})
        return {"attention": shape, "num_key_value_heads": num_heads, "head_dim": shape.head_dim}
    if width % num_heads:
        raise UserError("hidden_size", width, f"It must be a multiple of {num_heads} heads.")
    return {
        "attention": kind(),
        "num_key_value_heads": layer.get("num_key_value_heads") or num_heads,
        "head_dim": layer.get("head_dim") or width // num_heads,
    }


def _dspark(layer: dict[str, Any]) -> DSparkShape | None:
    """Return what DSpark or DFlash has in addition; None for EAGLE."""
    if DFLASH in layer["architectures"]:
        context = layer.get("dflash_config") or {}
        for name in ("causal", "use_swa", "attention_sink_bias", "attention_value_scale"):
            if context.get(name):
                raise UserError(f"dflash_config.{name}", context[name], "DFlash with this is not supported.")
        return DSparkShape(layer["block_size"] - 1, context["mask_token_id"], markov_rank=0)
    if DSPARK not in layer["architectures"]:
        return None
    for name, expected in (("markov_head_type", "vanilla"), ("sample_from_anchor", True)):
        if layer.get(name, expected) != expected:
            raise UserError(name, layer[name], f"Only drafters with {expected} are supported here.")
    return DSparkShape(layer["block_size"], layer["mask_token_id"], layer["markov_rank"])


def _numbers(layer: dict[str, Any], attention: AttentionFormat) -> dict[str, Any]:
    """Return the layer's sizes, with vLLM's defaults for missing ones.

    Raises:
        UserError: a size is missing or has the wrong type.
    """
    required = (*SHAPE_KEYS, *attention.required_keys)
    missing = [key for key in required if layer.get(key) is None]
    if missing:
        raise UserError("config.json", missing, "These keys are missing.")
    defaults = {"rms_norm_eps": 1e-6, "max_position_embeddings": attention.default_positions}
    values = {key: layer[key] for key in (*required, *defaults) if layer.get(key) is not None}
    for key, value in values.items():
        number = (int, float) if key == "rms_norm_eps" else int
        if isinstance(value, bool) or not isinstance(value, number):
            raise UserError(key, value, "config.json must have a number here.")
    return defaults | values


def _sliding_window(
    layer: dict[str, Any], num_layers: int, attention: type[AttentionShape]
) -> tuple[int | None, tuple[str, ...]]:
    """Return the window that vLLM serves the drafter with, and a note where that is not what the keys say.

    vLLM reads the width only for layers that `layer_types` names as sliding, and never for some kinds of
    attention.

    Raises:
        UserError: the layers have different windows, or the keys contradict each other.

    Source: `LlamaAttention` in models/llama.py of vLLM.
    """
    window, types = layer.get("sliding_window"), layer.get("layer_types") or ()
    served = "sliding_window" in attention.optional_parts
    if not served or not types:
        without = f"a drafter with {attention.title} has no window"
        reason = "there are no layer_types" if served else without
        note = f"sliding_window {window} is not used, as vLLM does not use it: {reason}."
        return None, () if window is None else (note,)
    if not isinstance(types, list) or len(types) < num_layers:
        raise UserError("layer_types", types, f"It must name the types of all {num_layers} layers.")
    sliding = {one == SLIDING for one in types[:num_layers]}
    if sliding == {False}:
        return None, ()
    if sliding != {True}:
        raise UserError("layer_types", types, "Layers with different windows are not supported here.")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise UserError("sliding_window", window, f"layer_types has {SLIDING}, which needs a width.")
    return window, ()


def _rope_parameters(layer: dict[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """Return RoPE's parameters of either spelling in the newer one, which has `rope_type` and `rope_theta`.

    Source: `RotaryEmbeddingConfigMixin` in modeling_rope_utils.py of transformers.
    """
    given = layer.get("rope_scaling") or layer.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise UserError("rope_scaling", given, "config.json must have an object here.")
    theta = layer.get("rope_theta")
    rope = {"rope_theta": 10000.0 if theta is None else theta, **given}
    for name in _PARTIAL:
        if (value := (layer | rope).get(name)) not in (None, 1.0):
            raise UserError(name, value, "Drafters that rotate a part of each head are not supported here.")
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", max_position_embeddings)
    return rope


def _refuse_unknown_parts(raw: dict[str, Any], layer: dict[str, Any]) -> None:
    """Raise UserError for parts of a checkpoint that are not supported here."""
    eagle = layer.get("eagle_config") or {}
    unknown = {
        "quantization_config": layer.get("quantization_config") or raw.get("quantization_config"),
        "logit_scale": layer.get("logit_scale", 1.0) != 1.0 and layer["logit_scale"],
        "eagle_config.use_aux_hidden_state=false": eagle.get("use_aux_hidden_state", True) is False,
        "hidden_act": layer.get("hidden_act", "silu") != "silu" and layer["hidden_act"],
        **{name: layer.get(name) for name in ("mla_use_nope", "index_topk")},  # of latent attention
    }
    for name, value in unknown.items():
        if value:
            raise UserError(name, value, "Drafters with this are not supported here.")


def vllm_default_ids(num_target_layers: int) -> tuple[int, ...]:
    """Return vLLM's ids for a checkpoint without any (`get_eagle3_default_aux_hidden_state_layers`)."""
    return (2, num_target_layers // 2, num_target_layers - 3)


def stated_ids(layer: dict[str, Any]) -> tuple[int, ...]:
    """Return a layer config's aux layer ids as vLLM captures them: each once, ascending; maybe none."""
    ids = layer.get(IDS) or (layer.get("eagle_config") or {}).get(IDS)
    # DeepSpec's and DFlash's, which count the outputs of layers.
    of_outputs = (layer.get("dflash_config") or layer).get("target_layer_ids") or ()
    return tuple(sorted(set(ids or [i + 1 for i in of_outputs])))


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
                f"aux layer ids {list(ids)} seem to count layer outputs, as SGLang does. They are used as "
                f"vLLM uses them; if acceptance is low, try {shifted}.",
            )
    elif num_target_layers is None:
        raise UserError(
            IDS,
            None,
            "config.json has none; give those that the drafter was trained with as "
            "drafter.aux_layer_ids=[...] or --aux-layer-ids ...",
        )
    else:
        ids = vllm_default_ids(num_target_layers)
        notes = (f"config.json has no aux layer ids: vLLM's default {list(ids)} is used.",)
    if len(ids) != num_aux:
        raise UserError(IDS, list(ids), f"The drafter reads {num_aux} hidden states (num_aux_hidden_states).")
    return ids, notes
