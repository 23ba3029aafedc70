from typing import Any

import pytest
from transformers import LlamaConfig

from eagle31.errors import UserError
from eagle31.export.layouts import Layout
from eagle31.export.published_config import SHAPE_KEYS, read_config
from tests.eagle31.export.exports import DEFAULT_ROPE, LATENT_YARN, LLAMA3, YARN, written
from tests.eagle31.tiny import DFLASH, DSPARK, MLA, QK_NORM, VOCAB, WIDE_MLA, tiny_config

# What a drafter may have, and the layouts that have none of it.
NOT_SGLANG, NOT_SPECULATORS = {Layout.sglang}, {Layout.speculators}
FEATURES: dict[str, tuple[dict[str, Any], set[Layout]]] = {
    "plain": ({"bos_token_id": 1, "eos_token_id": [2, 3]}, set()),
    "llama3": ({"rope_parameters": LLAMA3}, set()),
    "YaRN": ({"rope_parameters": YARN}, set()),
    "EAGLE 3": ({"fc_norm": False, "norm_output": False}, set()),
    "norm before fc": ({"norm_before_fc": True}, set()),
    "norm before residual": ({"norm_before_residual": True}, NOT_SGLANG),
    "three layers": ({"num_hidden_layers": 3}, set()),
    "window": ({"sliding_window": 48, "num_hidden_layers": 2}, NOT_SGLANG),
    "attention bias": ({"attention_bias": True}, NOT_SGLANG),
    "MLP bias": ({"mlp_bias": True}, NOT_SGLANG),
    "norms of queries": (QK_NORM, NOT_SGLANG),
    "MLA": (MLA | {"rope_parameters": DEFAULT_ROPE}, NOT_SPECULATORS),
    "wide MLA, YaRN": (WIDE_MLA | {"rope_parameters": LATENT_YARN}, NOT_SPECULATORS),
    "DSpark": (DSPARK, NOT_SGLANG | NOT_SPECULATORS),
    "DFlash": (DFLASH, NOT_SGLANG | NOT_SPECULATORS),
    "MLA, two layers": (MLA | {"num_hidden_layers": 2}, NOT_SGLANG | NOT_SPECULATORS),
}


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("feature", FEATURES)
def test_each_layout_is_read_back_or_refuses_what_it_lacks(layout: Layout, feature: str) -> None:
    changes, lacking = FEATURES[feature]
    config = tiny_config(**changes)
    if layout in lacking:
        with pytest.raises(UserError, match=r"export\.layout"):
            written(config, layout)
    else:
        read = read_config(written(config, layout))
        assert (read.config, read.layout, read.notes) == (config, layout, ())


def test_a_width_that_vllm_does_not_read_is_noted() -> None:
    read = read_config(written(tiny_config()) | {"sliding_window": 48, "use_sliding_window": True})
    assert read.config.sliding_window is None
    assert "48" in read.notes[0]


def test_layer_types_without_a_window_are_full_attention() -> None:
    full = {"layer_types": ["full_attention"]}
    for changes in (full, full | {"sliding_window": 48}, {"sliding_window": None}):
        read = read_config(written(tiny_config()) | changes)
        assert (read.config, read.notes) == (tiny_config(), ())
    latent = read_config(
        written(tiny_config(**MLA)) | {"sliding_window": 48, "layer_types": ["sliding_attention"]}
    )
    assert latent.config.sliding_window is None
    assert "MLA" in latent.notes[0]


def test_a_type_that_vllm_does_not_serve_is_read_with_a_note() -> None:
    read = read_config(written(tiny_config(**MLA)) | {"model_type": "deepseek_v3"})
    assert read.config == tiny_config(**MLA)
    assert "does not serve" in read.notes[0]


def test_missing_keys_have_vllms_defaults() -> None:
    raw = written(tiny_config(hidden_size=24, target_hidden_size=24, num_key_value_heads=4))
    dropped = (
        *("fc_norm", "norm_output", "norm_before_residual", "draft_vocab_size", "target_hidden_size"),
        *("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling"),
        *("num_aux_hidden_states", "eagle_aux_hidden_state_layer_ids"),
    )
    config = read_config({key: value for key, value in raw.items() if key not in dropped}).config
    assert (config.fc_norm, config.norm_output, config.norm_before_residual) == (False, False, False)
    assert (config.draft_vocab_size, config.target_hidden_size) == (VOCAB, 24)
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (6, 4, 1e-6)
    assert config.rope_parameters == DEFAULT_ROPE
    assert config.aux_layer_ids == (0, 2, 5)  # from eagle_config


def test_speculators_norm_before_residual_is_on_by_default() -> None:
    raw = written(tiny_config(), Layout.speculators)
    del raw["norm_before_residual"]
    assert read_config(raw).config.norm_before_residual


def test_ids_left_out_are_vllms_default_or_given() -> None:
    raw = written(tiny_config())
    del raw["eagle_aux_hidden_state_layer_ids"], raw["eagle_config"]
    read = read_config(raw, num_target_layers=36)
    assert read.config.aux_layer_ids == (2, 18, 33)
    assert "[2, 18, 33]" in read.notes[0]
    with pytest.raises(UserError, match=r"drafter\.aux_layer_ids=\[\.\.\.\]"):
        read_config(raw)
    assert read_config(raw, aux_layer_ids=[1, 2, 3]).config.aux_layer_ids == (1, 2, 3)


def test_ids_that_count_layer_outputs_are_noted() -> None:
    raw = written(tiny_config(aux_layer_ids=(1, 17, 32)))
    read = read_config(raw, num_target_layers=36)
    assert read.config.aux_layer_ids == (1, 17, 32)
    assert "[2, 18, 33]" in read.notes[0]


GQA: dict[str, Any] = {}
TWO_LAYERS = {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("shape", "changes", "field"),
    [
        (GQA, {"architectures": ["Gemma4Eagle3Model"]}, "architectures"),
        (GQA, {"architectures": ["Eagle3Qwen3ForCausalLM"], "mlp_bias": True}, "drafter.mlp_bias"),
        (GQA, {"num_aux_hidden_states": 4}, "eagle_aux_hidden_state_layer_ids"),
        (GQA, {"hidden_size": None}, "config.json"),
        (GQA, {"hidden_size": "16"}, "hidden_size"),
        (GQA, {"rope_scaling": "yarn"}, "rope_scaling"),
        (GQA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "drafter.rope_parameters.rope_type"),
        (GQA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (GQA, {"rotary_pct": 0.25}, "rotary_pct"),
        (
            GQA,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        (MLA, {"kv_lora_rank": 7.5}, "kv_lora_rank"),
        (MLA, {"mla_use_nope": True}, "mla_use_nope"),
        (MLA, {"model_type": "llama"}, "model_type"),
        (MLA, {"q_lora_rank": None}, "q_lora_rank"),
        (TWO_LAYERS, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        (TWO_LAYERS, {"layer_types": ["sliding_attention"]}, "layer_types"),
        (TWO_LAYERS, {"layer_types": ["sliding_attention"] * 2}, "sliding_window"),  # no width
    ],
)
def test_what_cannot_be_served_as_it_says_is_refused(shape: dict, changes: dict, field: str) -> None:
    with pytest.raises(UserError) as raised:
        read_config(written(tiny_config(**shape)) | changes)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type"),
        ({"transformer_layer_config": {"model_type": "qwen2"}}, "transformer_layer_config.model_type"),
    ],
)
def test_speculators_parts_that_are_refused(changes: dict, field: str) -> None:
    with pytest.raises(UserError) as raised:
        read_config(written(tiny_config(), Layout.speculators) | changes)
    assert raised.value.field == field


ROPES: list[dict[str, Any]] = [
    {},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1e6},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}, "rope_theta": 5e5},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"max_position_embeddings": 512, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
]


@pytest.mark.parametrize("rope", ROPES)
def test_llama_defaults_are_those_of_transformers(rope: dict[str, Any]) -> None:
    """vLLM reads a config.json with transformers."""
    raw = written(tiny_config(num_key_value_heads=4, head_dim=4))
    layer = {key: raw[key] for key in SHAPE_KEYS} | rope
    config = read_config(layer | {key: raw[key] for key in ("architectures", "eagle_config")}).config
    theirs = LlamaConfig(**layer)
    assert config.rope_parameters == theirs.rope_parameters
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(config, name) == getattr(theirs, name), name
