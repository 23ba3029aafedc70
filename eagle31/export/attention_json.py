"""How config.json has the kinds of attention."""

from dataclasses import dataclass
from typing import Any

from eagle31.errors import UserError
from eagle31.model.shapes import AttentionShape, GqaShape, MlaShape, NormedGqaShape

DEEPSPEC = "Qwen3Eagle3Model"  # the architecture of DeepSpec's drafters, which vLLM has under another name


@dataclass(frozen=True)
class AttentionFormat:
    """What a config.json has that vLLM loads as a kind of attention."""

    architectures: tuple[str, ...]  # an export has the first
    model_types: tuple[str, ...]  # an export has the first
    default_positions: int  # vLLM's max_position_embeddings where there are none
    required_keys: tuple[str, ...] = ()  # in addition to the layer's sizes
    in_speculators: bool = False  # whether vLLM reads it in the layout of speculators
    in_sglang: bool = False  # whether SGLang has it


FORMATS: dict[type[AttentionShape], AttentionFormat] = {
    GqaShape: AttentionFormat(
        # What vLLM 0.32 loads as `Eagle3LlamaForCausalLM`; it adds "Eagle3" to a plain LlamaForCausalLM.
        architectures=(
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "LlamaForCausalLM",
            "Eagle3MiniMaxM2ForCausalLM",
            "Eagle3Qwen2_5vlForCausalLM",
            "Eagle3Qwen3vlForCausalLM",
        ),
        model_types=("llama",),
        default_positions=2048,
        in_speculators=True,
        in_sglang=True,
    ),
    NormedGqaShape: AttentionFormat(
        architectures=("Eagle3Qwen3ForCausalLM", DEEPSPEC),
        model_types=("qwen3",),
        default_positions=32768,
        required_keys=("num_key_value_heads", "head_dim"),
        in_speculators=True,
    ),
    MlaShape: AttentionFormat(
        architectures=("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
        # vLLM reads a drafter of type "deepseek_v3" as a multi-token prediction head.
        model_types=("kimi_k2", "deepseek_v3", "deepseek_v2"),
        default_positions=4096,
        required_keys=MlaShape.widths(),
        in_sglang=True,
    ),
}


def attention_kind(layer: dict[str, Any]) -> type[AttentionShape]:
    """Return the kind of attention that a layer's config describes.

    Raises:
        UserError: vLLM has no such EAGLE-3 drafter, or it is not supported here.
    """
    architecture = next(iter(layer.get("architectures") or ()), None)
    for kind, found in FORMATS.items():
        if architecture in found.architectures:
            return kind
    supported = [name for found in FORMATS.values() for name in found.architectures]
    raise UserError("architectures", architecture, f"Supported are {', '.join(supported)}.")


def check_latent(layer: dict[str, Any]) -> None:
    """Raise UserError for keys of latent attention that are not supported here."""
    types = FORMATS[MlaShape].model_types
    if layer.get("model_type") not in types:
        raise UserError("model_type", layer.get("model_type"), f"Supported are {', '.join(types)}.")
    if layer.get("q_lora_rank", 0) is None:  # not missing: it says that queries have no latent
        raise UserError("q_lora_rank", None, "Drafters whose queries have no latent are not supported.")
    for name in ("mla_use_nope", "index_topk"):
        if layer.get(name):
            raise UserError(name, layer[name], "Drafters with this are not supported here.")


def attention_heads(kind: type[AttentionShape], layer: dict[str, Any]) -> dict[str, Any]:
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
