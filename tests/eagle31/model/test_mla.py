"""Multi-head latent attention compared with transformers'."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from eagle31.kernels.plain_attention import LayerKeys, attend_by_run
from eagle31.kernels.query_run import QueryRun
from eagle31.model.attention import LatentAttention
from eagle31.model.config import DrafterConfig
from eagle31.model.rope import Rotary
from eagle31.model.shapes import MlaShape
from tests.eagle31.tiny import MLA, tiny_config

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 1.3,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("rope", [PLAIN, YARN, YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}])
def test_it_is_deepseeks_attention(rope: dict[str, Any]) -> None:
    """Compares the order of the rotated pairs, YaRN's tables and its temperature."""
    config = tiny_config(rope_parameters=rope, **MLA)
    assert isinstance(config.attention, MlaShape)
    torch.manual_seed(0)
    theirs = deepseek_attention(config).double()
    ours = LatentAttention(config, reads_embedding=False).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(40, config.hidden_size, dtype=torch.float64)
    positions = torch.arange(40)
    cos, sin = Rotary(config.rotary_width, config.rope_parameters, 64)(positions)
    keys = LayerKeys(*ours.expanded(ours.compressed(x, (cos, sin))))
    query = ours.query(x, (cos, sin))
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
