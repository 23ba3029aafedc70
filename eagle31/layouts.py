"""The layouts in which EAGLE-3 drafters are published: config.json and tensor names, in both directions."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from eagle31.config import DrafterConfig
from eagle31.errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# What vLLM 0.32 loads as `Eagle3LlamaForCausalLM`; it puts "Eagle3" before a bare LlamaForCausalLM itself.
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)
IDS = "eagle_aux_hidden_state_layer_ids"
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
_LLAMA_KEYS = (
    *SHAPE_KEYS,
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)


class Layout(Enum):
    """How an export is written."""

    vllm = "vllm"  # the drafter's own config.json: `--speculative-config` names export and method
    speculators = "speculators"  # names its target too: a bare `vllm serve EXPORT`


@dataclass(frozen=True)
class Verifier:
    """What a speculators checkpoint says of how it is served."""

    name_or_path: str  # the target
    architectures: tuple[str, ...]
    draft_tokens: int


@dataclass(frozen=True)
class ReadConfig:
    """A published config.json, understood."""

    config: DrafterConfig
    layout: Layout
    notes: tuple[str, ...]  # what was assumed, for a person


def write_config(
    config: DrafterConfig, layout: Layout, dtype: str, verifier: Verifier | None = None
) -> dict[str, Any]:
    """`config.json` in a layout.

    Args:
        dtype: of the exported weights, such as "bfloat16".
        verifier: needed for `Layout.speculators`.

    Source: vllm/transformers_utils/configs/speculators (what vLLM reads of it).
    """
    own = config.to_json(dtype)
    if layout is Layout.vllm:
        return own
    assert verifier is not None
    # vLLM takes the norms and the ids from the top level and everything else from the layer's config.
    at_top = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "fc_norm", "norm_output", IDS)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": verifier.draft_tokens}],
            "verifier": {
                "name_or_path": verifier.name_or_path,
                "architectures": list(verifier.architectures),
            },
        },
        **{key: own[key] for key in at_top},
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": {key: value for key, value in own.items() if key != "architectures"},
    }


def layout_of(raw: dict[str, Any]) -> Layout:
    """Of a parsed config.json."""
    is_speculators = "speculators_config" in raw or "speculators_model_type" in raw
    return Layout.speculators if is_speculators else Layout.vllm


def layer_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The drafter's keys as vLLM sees them: speculators' top level overrides some of the layer's.

    Raises:
        UserError: a speculators checkpoint of another algorithm, or without its layer.
    """
    if layout_of(raw) is Layout.vllm:
        return raw
    if raw.get("speculators_model_type") != "eagle3":
        remedy = "Only eagle3 drafters can be read."
        raise UserError("speculators_model_type", raw.get("speculators_model_type"), remedy)
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError("transformer_layer_config", layer, "The layer's shape is missing from config.json.")
    taken = {key: raw[key] for key in ("target_hidden_size", IDS) if raw.get(key)}
    return layer | {
        **taken,
        "draft_vocab_size": raw.get("draft_vocab_size"),
        "norm_before_residual": raw.get("norm_before_residual", True),
        "norm_before_fc": raw.get("norm_before_fc", False),
        "fc_norm": raw.get("fc_norm", False),
        "norm_output": raw.get("norm_output", False),
    }


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
    try:
        llama = LlamaConfig(**{key: layer[key] for key in _LLAMA_KEYS if layer.get(key) is not None})
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError("config.json", "its layer", f"It can not be understood: {reason}") from error
    ids, notes = _aux_layer_ids(layer, num_target_layers, aux_layer_ids)
    # The types of LlamaConfig's fields are wider than what its constructor leaves there.
    kv_heads: Any = llama.num_key_value_heads
    head_dim: Any = layer.get("head_dim") or llama.hidden_size // llama.num_attention_heads
    config = DrafterConfig(
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_hidden_layers=llama.num_hidden_layers,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=llama.rms_norm_eps,
        rope_parameters=dict(llama.rope_parameters or {}),
        max_position_embeddings=llama.max_position_embeddings,
        vocab_size=llama.vocab_size,
        draft_vocab_size=layer.get("draft_vocab_size") or llama.vocab_size,
        target_hidden_size=layer.get("target_hidden_size") or llama.hidden_size,
        aux_layer_ids=ids,
        fc_norm=bool(layer.get("fc_norm", False)),
        norm_output=bool(layer.get("norm_output", False)),
        norm_before_residual=bool(layer.get("norm_before_residual", False)),
        bos_token_id=layer.get("bos_token_id"),
        eos_token_id=layer.get("eos_token_id"),
    )
    return ReadConfig(config, layout_of(raw), notes)


def refuse_unknown_parts(raw: dict[str, Any], layer: dict[str, Any]) -> None:
    """Raises UserError for what a checkpoint has and our drafter has not, naming it."""
    eagle = layer.get("eagle_config") or {}
    if layout_of(raw) is Layout.vllm:
        architecture = next(iter(raw.get("architectures") or ()), None)
        if architecture not in ARCHITECTURES:
            raise UserError("architectures", architecture, f"Readable are {', '.join(ARCHITECTURES)}.")
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


def served_name(name: str, layout: Layout = Layout.vllm) -> str:
    """Our parameter name -> the checkpoint's: in vLLM's layout the first layer is `midlayer`."""
    if layout is Layout.vllm and name.startswith("layers.0."):
        return name.replace("layers.0.", "midlayer.", 1)
    return name


def own_name(name: str) -> str:
    """The checkpoint's tensor name -> ours."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def read_raw_config(directory: Path) -> dict[str, Any]:
    """Raises UserError when config.json is not there or not JSON."""
    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError("config.json", directory, f"It can not be read: {error}") from error
    if not isinstance(raw, dict):
        raise UserError("config.json", directory, "It holds no JSON object.")
    return raw


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor by the name it has there, from one safetensors file or several with their index.

    Raises:
        UserError: a file is missing, damaged, or no safetensors.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        try:
            tensors |= load_file(directory / file)
        except (OSError, SafetensorError) as error:
            remedy = f"It can not be read, it is missing or damaged; fetch or export it again ({error})."
            raise UserError(file, directory, remedy) from error
    return tensors


def _weight_files(directory: Path) -> list[str]:
    index = directory / INDEX
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, json.JSONDecodeError, KeyError) as error:
            raise UserError(INDEX, directory, f"It can not be read: {error!r}") from error
    if not (directory / WEIGHTS).exists() and list(directory.glob("*.bin")):
        remedy = "Its weights are pickled, which can run any code; convert them to model.safetensors."
        raise UserError("checkpoint", directory, remedy)
    return [WEIGHTS]
