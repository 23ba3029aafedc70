"""The kernels that a row launches, with the heads of the recipes' drafters."""

from typing import Any

import pytest
import torch

from eagle31.model.shapes import MlaShape
from scripts.bench.pretended_gpu.device import PretendedGpu
from tests.eagle31.tiny import tiny_config
from tests.pretended_gpu.steps import drafter_on_gpu, host_batch, step

aten = torch.ops.aten
BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "intermediate_size": 96}
SHAPES: dict[str, dict[str, Any]] = {
    "llama3_1_8b": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
    "kimi_k2_6": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "attention": MlaShape(
            q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
    },
}
# Of forward and backward at seven steps, with one chunk of the loss.
LARGEST = {"llama3_1_8b": 600, "kimi_k2_6": 660}


@pytest.mark.parametrize("recipe", SHAPES)
def test_a_step_has_few_launches(recipe: str) -> None:
    config = tiny_config(**SIZES, **SHAPES[recipe])
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, BF16)
        batch = host_batch(config, BF16)
        before = len(gpu.launches)
        with gpu.no_waiting():
            step(drafter, frozen, batch, num_steps=7, with_metrics=False)
        launches = gpu.launches[before:]
    assert len(launches) <= LARGEST[recipe]
    assert not {aten.index_add_.default, aten.scatter_add_.default} & set(launches)
