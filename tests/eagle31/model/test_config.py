from collections.abc import Callable
from typing import Any

import pytest

from eagle31.errors import UserError
from eagle31.model.config import DSparkShape
from eagle31.model.shapes import GqaShape, MlaShape
from tests.eagle31.tiny import DSPARK, MLA, VOCAB, tiny_config


def mla_with(**changes: int) -> dict[str, Any]:
    return MLA | {"attention": MlaShape(**vars(MLA["attention"]) | changes)}


def with_rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, **changes}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (lambda: mla_with(qk_rope_head_dim=3), "qk_rope_head_dim"),
        (lambda: mla_with(v_head_dim=10), "v_head_dim"),
        (lambda: mla_with(kv_lora_rank=0), "kv_lora_rank"),
        (lambda: {"aux_layer_ids": (3, 1)}, "aux_layer_ids"),
        (lambda: {"num_key_value_heads": 3}, "num_key_value_heads"),
        (lambda: {"head_dim": 5}, "head_dim"),
        (lambda: {"draft_vocab_size": 62}, "draft_vocab_size"),
        (lambda: {"sliding_window": 0}, "sliding_window"),
        (lambda: MLA | {"sliding_window": 64}, "sliding_window"),
        (lambda: DSPARK | {"attention": GqaShape()}, "attention"),
        (lambda: DSPARK | {"norm_output": True}, "norm_output"),
        (lambda: DSPARK | {"sliding_window": 8}, "sliding_window"),
        (lambda: DSPARK | {"dspark": DSparkShape(3, VOCAB, 5)}, "mask_token_id"),
        (lambda: with_rope(rope_type="dynamic", factor=2.0), "rope_parameters.rope_type"),
        (lambda: with_rope(rope_type="linear"), "rope_parameters.factor"),
        (
            lambda: with_rope(rope_type="linear", factor=2.0, partial_rotary_factor=0.5),
            "rope_parameters.partial_rotary_factor",
        ),
    ],
)
def test_impossible_shapes_are_refused(changes: Callable[[], dict[str, Any]], field: str) -> None:
    with pytest.raises(UserError) as raised:
        tiny_config(**changes())
    assert raised.value.field == f"drafter.{field}"


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
