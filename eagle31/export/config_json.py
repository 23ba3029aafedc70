"""The config.json of an export."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle31.errors import UserError
from eagle31.export.layouts import DFLASH, DSPARK, IDS, SPECULATORS_TOP, Layout, Verifier, sglang_ids
from eagle31.model.config import DrafterConfig, DSparkShape
from eagle31.model.shapes import AttentionShape, GqaShape, MlaShape, NormedGqaShape

_NOT_IN_SGLANG = ("norm_before_residual", "sliding_window", "attention_bias", "mlp_bias")
# vLLM does not read them for DSpark.
_EAGLE_KEYS = (
    *(IDS, "eagle_config", "num_aux_hidden_states"),
    *("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc"),
)
SLIDING = "sliding_attention"  # among the layer_types
DEEPSPEC = "Qwen3Eagle3Model"  # the architecture of DeepSpec's drafters, which vLLM has under another name
# Fields of `DrafterConfig` that are keys of config.json.
SHAPE_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
NUMBERS = ("rms_norm_eps", "max_position_embeddings")
FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias")
TOKEN_IDS = ("bos_token_id", "eos_token_id")
_WIDTHS = ("num_key_value_heads", "draft_vocab_size", "target_hidden_size")
_SAME = (*SHAPE_KEYS, *_WIDTHS, *NUMBERS, "rope_theta", *FLAGS, *TOKEN_IDS)


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
        architectures=("Eagle3Qwen3ForCausalLM", DEEPSPEC, DSPARK, DFLASH),
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


def config_json(
    config: DrafterConfig, layout: Layout, dtype: str, verifier: Verifier | None = None
) -> dict[str, Any]:
    """Return the content of `config.json` in a layout.

    Args:
        dtype: of the exported weights, such as "bfloat16".
        verifier: required for `Layout.speculators`.

    Raises:
        UserError: vLLM does not read this layout for this drafter.

    Source: models/llama_eagle3.py, models/deepseek_eagle3.py and transformers_utils/configs/speculators of
    vLLM, which read it; for DSpark qwen3_dspark.py, and qwen3_dflash.py.
    """
    drafter = _drafter_json(config, dtype)
    if config.dspark is not None:
        if layout is not Layout.vllm:
            raise UserError("export.layout", layout.value, "DSpark and DFlash need export.layout=vllm.")
        return {name: value for name, value in drafter.items() if name not in _EAGLE_KEYS} | _dspark_json(
            config.dspark, config.aux_layer_ids
        )
    if layout is Layout.sglang:
        _check_sglang(config)
        drafter["eagle_config"][IDS] = sglang_ids(config.aux_layer_ids)
    if layout is not Layout.speculators:
        return drafter
    if not FORMATS[type(config.attention)].in_speculators:
        remedy = f"vLLM does not read this layout for {config.attention.title}; use export.layout=vllm."
        raise UserError("export.layout", layout.value, remedy)
    assert verifier is not None
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
        **{key: drafter[key] for key in (*SPECULATORS_TOP, "target_hidden_size", IDS)},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": {key: value for key, value in drafter.items() if key != "architectures"},
    }


def _dspark_json(shape: DSparkShape, aux_layer_ids: Sequence[int]) -> dict[str, Any]:
    """Return the keys that DSpark or DFlash has in addition."""
    context: dict[str, Any] = {"mask_token_id": shape.mask_token_id}
    context["target_layer_ids"] = sglang_ids(aux_layer_ids)  # they count layer outputs too
    if shape.is_dflash:
        return {"architectures": [DFLASH], "block_size": shape.size + 1, "dflash_config": context}
    return context | {
        "architectures": [DSPARK],
        "block_size": shape.size,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "sample_from_anchor": True,
    }


def _check_sglang(config: DrafterConfig) -> None:
    """Raise UserError for what SGLang's drafters do not have: it would leave it out without a word.

    Source: models/llama_eagle3.py and models/kimi_k25_eagle3.py of SGLang 0.5.23.
    """
    absent = [name for name in _NOT_IN_SGLANG if getattr(config, name)]
    if not FORMATS[type(config.attention)].in_sglang:
        absent.append("attention")
    if isinstance(config.attention, MlaShape) and config.num_hidden_layers > 1:
        absent.append("num_hidden_layers")
    if len(config.aux_layer_ids) * config.target_hidden_size == config.hidden_size:
        absent.append("aux_layer_ids")  # it takes states of the drafter's width for its own, without fc
    for name in absent:
        remedy = "SGLang's drafters do not have this; use export.layout=vllm."
        raise UserError(f"drafter.{name}", getattr(config, name), remedy)


def _drafter_json(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    # The older spelling of RoPE: vLLM, transformers 4 and 5 and SGLang all read it.
    rope_scaling = {key: value for key, value in config.served_rope.items() if key != "rope_theta"}
    scaled = rope_scaling["rope_type"] != "default"
    ids, attention = list(config.aux_layer_ids), FORMATS[type(config.attention)]
    # MLA without head_dim, which some versions of transformers read as qk_rope_head_dim.
    widths = asdict(config.attention) or {"head_dim": config.head_dim}
    window: dict[str, Any] = {}
    if isinstance(config.attention, NormedGqaShape):
        window["use_sliding_window"] = config.sliding_window is not None
    if config.sliding_window is not None:  # vLLM reads the width only for layers of this type
        window["sliding_window"] = config.sliding_window
        window["layer_types"] = [SLIDING] * config.num_hidden_layers
    return {
        "architectures": [attention.architectures[0]],
        "model_type": attention.model_types[0],
        **{key: getattr(config, key) for key in _SAME},
        **widths,
        **window,
        "hidden_act": "silu",
        "rope_scaling": rope_scaling if scaled else None,
        "num_aux_hidden_states": len(ids),
        IDS: ids,
        "eagle_config": {IDS: list(ids), "use_aux_hidden_state": True},
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
