"""Multi-head latent attention compared with transformers', and Kimi K2.6's drafter at full size."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from eagle31.export.layouts import Layout
from eagle31.export.rules import expected_shapes
from eagle31.kernels.query_run import QueryRun
from eagle31.model.attention import LayerKeys, attend_by_run
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.mla import LatentAttention, MlaShape
from eagle31.model.rope import Rotary
from tests.eagle31.tiny import MLA, WIDE_MLA, tiny_config

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 1.3,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

# The text part of the target's config.json; public drafters for it have the same shape.
KIMI_K2_6 = DrafterConfig(
    hidden_size=7168,
    intermediate_size=18432,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=192,
    vocab_size=163840,
    draft_vocab_size=163840,
    target_hidden_size=7168,
    aux_layer_ids=(2, 30, 58),
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    max_position_embeddings=262144,
    attention=MlaShape(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
)


@pytest.mark.parametrize("rope", [PLAIN, YARN, YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}])
@pytest.mark.parametrize("changes", [MLA, WIDE_MLA])
def test_it_is_deepseeks_attention(rope: dict[str, Any], changes: dict[str, Any]) -> None:
    """Compares the order of the rotated pairs, YaRN's tables and its temperature."""
    config = tiny_config(rope_parameters=rope, **changes)
    assert isinstance(config.attention, MlaShape)
    torch.manual_seed(0)
    theirs = deepseek_attention(config).double()
    ours = LatentAttention(config, reads_embedding=False).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(40, config.hidden_size, dtype=torch.float64)
    positions = torch.arange(40)
    cos, sin = Rotary(config.rotary_width, config.rope_parameters, 64)(positions)
    keys = LayerKeys(*ours.key_value(x, cos, sin))
    query = ours.query(x, cos, sin)
    attended = attend_by_run(query, keys, [QueryRun(0, 40, 0, 40)], config.attention_scale)
    found = ours.output(attended)
    torch.testing.assert_close(found, by_deepseek(theirs, x, positions), rtol=1e-6, atol=1e-7)


def deepseek_attention(config: DrafterConfig) -> DeepseekV3Attention:
    assert isinstance(config.attention, MlaShape)
    theirs = DeepseekV3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=64,
        **vars(config.attention),
    )
    theirs._attn_implementation = "eager"
    return DeepseekV3Attention(theirs, layer_idx=0)


def by_deepseek(attention: DeepseekV3Attention, x: Tensor, positions: Tensor) -> Tensor:
    tables = DeepseekV3RotaryEmbedding(attention.config)(x[None], positions[None])
    hidden = torch.full((len(x), len(x)), float("-inf"), dtype=x.dtype).triu(1)
    output, *_ = attention(x[None], position_embeddings=tables, attention_mask=hidden[None, None])
    return output[0]


def test_yarn_raises_the_scores_of_long_contexts() -> None:
    rope = KIMI_K2_6.rope_parameters
    assert KIMI_K2_6.attention.score_factor(rope) == pytest.approx((0.1 * 4.158883083 + 1) ** 2)
    assert KIMI_K2_6.attention.score_factor(rope | {"factor": 1.0}) == 1.0
    assert KIMI_K2_6.attention.score_factor({"rope_type": "yarn", "factor": 64.0}) == 1.0
    assert KIMI_K2_6.attention_scale == pytest.approx(192**-0.5 * 2.0047397)


def test_kimi_k2_6_at_full_size_is_what_vllm_loads() -> None:
    """Compares names and shapes with `Eagle3DeepseekV2ForCausalLM` of vLLM 0.32, before it fuses any."""
    width, heads = 7168, 64
    expected = {
        "fc.weight": (width, 3 * width),
        "fc_norm.0.weight": (width,),
        "fc_norm.1.weight": (width,),
        "fc_norm.2.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.self_attn.q_a_proj.weight": (1536, 2 * width),
        "midlayer.self_attn.q_a_layernorm.weight": (1536,),
        "midlayer.self_attn.q_b_proj.weight": (heads * (128 + 64), 1536),
        "midlayer.self_attn.kv_a_proj_with_mqa.weight": (512 + 64, 2 * width),
        "midlayer.self_attn.kv_a_layernorm.weight": (512,),
        "midlayer.self_attn.kv_b_proj.weight": (heads * (128 + 128), 512),
        "midlayer.self_attn.o_proj.weight": (width, heads * 128),
        "midlayer.mlp.gate_proj.weight": (18432, width),
        "midlayer.mlp.up_proj.weight": (18432, width),
        "midlayer.mlp.down_proj.weight": (width, 18432),
        "norm.weight": (width,),
        "lm_head.weight": (163840, width),
        "embed_tokens.weight": (163840, width),
    }
    assert expected_shapes(KIMI_K2_6, Layout.vllm) == expected
    with torch.device("meta"):
        drafter = Drafter(KIMI_K2_6)
    assert all(parameter.is_meta for parameter in drafter.parameters())
    with_embedding = sum(p.numel() for p in drafter.parameters()) + 163840 * width
    assert with_embedding == sum(torch.Size(shape).numel() for shape in expected.values())
