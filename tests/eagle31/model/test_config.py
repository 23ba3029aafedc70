import pytest

from eagle31.errors import UserError
from eagle31.model.mla import MlaShape
from tests.eagle31.tiny import MLA, tiny_config


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"qk_rope_head_dim": 3}, "drafter.qk_rope_head_dim"),
        ({"v_head_dim": 10}, "drafter.v_head_dim"),
        ({"kv_lora_rank": 0}, "drafter.kv_lora_rank"),
    ],
)
def test_impossible_widths_of_mla_are_refused(changes: dict, field: str) -> None:
    with pytest.raises(UserError) as raised:
        MlaShape(**vars(MLA["attention"]) | changes)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"aux_layer_ids": (3, 1)}, "drafter.aux_layer_ids"),
        ({"num_key_value_heads": 3}, "drafter.num_key_value_heads"),
        ({"head_dim": 5}, "drafter.head_dim"),
        ({"draft_vocab_size": 62}, "drafter.draft_vocab_size"),
        ({"sliding_window": 0}, "drafter.sliding_window"),
        (MLA | {"sliding_window": 64}, "drafter.sliding_window"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, field: str) -> None:
    with pytest.raises(UserError) as raised:
        tiny_config(**changes)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "drafter.rope_parameters.rope_type"),
        (
            {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
            "drafter.rope_parameters.partial_rotary_factor",
        ),
        ({"rope_type": "linear"}, "drafter.rope_parameters.factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "drafter.rope_parameters.low_freq_factor"),
        ({"rope_theta": None}, "drafter.rope_parameters.rope_theta"),
    ],
)
def test_rope_that_vllm_would_compute_differently_is_refused(rope: dict, field: str) -> None:
    with pytest.raises(UserError) as raised:
        tiny_config(rope_parameters={"rope_theta": 1e4, **rope})
    assert raised.value.field == field


LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_type": "llama3"}, "rope_type"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"mscale": 0.7}, "mscale, mscale_all_dim"),
        ({"attention_factor": 1.0}, "attention_factor"),
        ({"truncate": False}, "truncate"),
    ],
)
def test_rope_that_vllm_would_compute_differently_for_mla_is_refused(rope: dict, field: str) -> None:
    tiny_config(**MLA, rope_parameters=LATENT_YARN)
    with pytest.raises(UserError) as raised:
        tiny_config(**MLA, rope_parameters=LATENT_YARN | rope)
    assert raised.value.field == f"drafter.rope_parameters.{field}"


def test_rope_keys_that_nobody_reads_are_not_served() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert tiny_config(rope_parameters=rope).served_rope == {"rope_type": "default", "rope_theta": 1e4}
