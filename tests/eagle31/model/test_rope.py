"""RoPE's tables compared with those of transformers, to the last bit."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle31.model.rope import Rotary

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LENGTH = {"original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        LLAMA3 | LENGTH,
        LLAMA3,  # the original length is the model's
        YARN,
        YARN | LENGTH | {"beta_fast": 16.0, "beta_slow": 2.0},
        YARN | LENGTH | {"mscale": 0.7, "mscale_all_dim": 1.3},
        YARN | LENGTH | {"attention_factor": 1.2, "truncate": False},
        YARN | {"factor": 1.0, "original_max_position_embeddings": 16},
    ],
)
def test_tables_are_those_of_transformers(rope: dict[str, Any]) -> None:
    positions = torch.arange(0, 5000, 7)
    for width, theta in ((6, 500000.0), (64, 10000.0)):
        rope = {**rope, "rope_theta": theta}
        config = LlamaConfig(head_dim=width, max_position_embeddings=2048, rope_parameters=dict(rope))
        cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
        found = Rotary(width, rope, 2048)(positions)
        assert found[0].shape == (len(positions), width)
        assert torch.equal(found[0], cos[0])
        assert torch.equal(found[1], sin[0])
