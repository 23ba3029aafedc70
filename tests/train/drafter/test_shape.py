"""The drafter's attention heads, from the recipe and the target."""

from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from eagle31.errors import UserError
from eagle31.model.shapes import GqaShape, MlaShape
from train.config.drafter import Attention, DrafterShape
from train.drafter.shape import attention_heads, fitted, rope_parameters, sliding_window

DEEPSEEK = DeepseekV3Config(
    hidden_size=96,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
LLAMA = LlamaConfig(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=20)
WIDTHS: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def heads(target: Any, **shape: Any) -> dict[str, Any]:
    return attention_heads(DrafterShape(**shape), target, 4, 96)


def test_mla_takes_the_widths_of_a_target_with_mla() -> None:
    found = heads(DEEPSEEK, attention=Attention.mla)
    assert found == {"num_key_value_heads": 4, "head_dim": 24, "attention": MlaShape(24, 32, 16, 8, 12)}
    assert heads(DEEPSEEK, attention=Attention.mla, kv_lora_rank=64)["attention"] == MlaShape(
        24, 64, 16, 8, 12
    )


def test_mla_for_a_target_without_it_needs_widths() -> None:
    with pytest.raises(UserError, match=r"drafter\.kv_lora_rank"):
        heads(LLAMA, attention=Attention.mla, q_lora_rank=48)
    found = heads(LLAMA, attention=Attention.mla, **WIDTHS)
    assert found["attention"] == MlaShape(48, 512, 128, 64, 128)


@pytest.mark.parametrize("target", [DEEPSEEK, LLAMA])
def test_gqa_is_the_default_for_every_target(target: Any) -> None:
    found = heads(target)
    # head_dim in a config with MLA is the width of the part with RoPE only.
    assert found["head_dim"] == (12 if target is DEEPSEEK else 20)
    assert found["num_key_value_heads"] == target.num_key_value_heads
    assert found["attention"] == GqaShape()


def test_a_target_without_a_number_of_key_heads_has_as_many_as_query_heads() -> None:
    assert heads(GPTNeoXConfig(hidden_size=96, num_attention_heads=4))["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"attention": Attention.gqa, "q_lora_rank": 24}, "q_lora_rank"),
        ({"attention": Attention.mla, "head_dim": 64}, "head_dim"),
    ],
)
def test_widths_of_the_other_attention_are_refused(shape: dict, field: str) -> None:
    with pytest.raises(UserError) as raised:
        heads(DEEPSEEK, **shape)
    assert raised.value.field == f"drafter.{field}"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (LLAMA, None),
        (MistralConfig(sliding_window=4096), 4096),
        (Qwen3Config(use_sliding_window=False, sliding_window=512), None),
        (Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]), None),
        (GptOssConfig(num_hidden_layers=2, sliding_window=128), None),  # every second layer
    ],
    ids=["llama", "mistral", "qwen3", "mixed", "gpt-oss"],
)
def test_a_window_that_vllm_would_take_from_the_target_is_trained(target: Any, expected: int | None) -> None:
    assert sliding_window(DrafterShape(), target) == expected
    assert sliding_window(DrafterShape(sliding_window=64), target) == 64
    assert sliding_window(DrafterShape(attention=Attention.mla), target) is None


@pytest.mark.parametrize(("size", "expected"), [(None, None), (63, 63), (64, None), (65, None)])
def test_a_draft_vocabulary_that_is_not_smaller_is_the_targets(
    size: int | None, expected: int | None
) -> None:
    assert fitted(DrafterShape(draft_vocab_size=size), 64).draft_vocab_size == expected


def test_rope_is_that_of_the_layers_that_attend_as_the_drafter() -> None:
    given = {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6}
    local = {"rope_type": "default", "rope_theta": 500.0}
    target = Gemma3TextConfig(rope_parameters={"full_attention": given, "sliding_attention": local})
    assert rope_parameters({}, target, None) == given
    assert rope_parameters({}, target, 64) == local
    own = {"rope_type": "default", "rope_theta": 7.0}
    assert rope_parameters(own, target, None) == own
    assert rope_parameters({}, LLAMA, 64)["rope_theta"] == LLAMA.rope_parameters["rope_theta"]
    target.rope_parameters = {"compressed": given}
    with pytest.raises(UserError, match=r"drafter\.rope_parameters=.*no single set"):
        rope_parameters({}, target, None)
