"""The kernels that a row launches, with the heads of the recipes' drafters."""

from typing import Any

import pytest
import torch

from eagle31.model.mla import MlaShape
from eagle31.training import step as training_step
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
# Those of forward and backward at seven steps without the loss, some of whose rows end before the last step.
LARGEST = {"llama3_1_8b": 560, "kimi_k2_6": 620}


@pytest.mark.parametrize("recipe", SHAPES)
def test_a_step_has_few_launches(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(**SIZES, **SHAPES[recipe])
    with PretendedGpu() as gpu:
        in_loss = []
        one_pass_loss = training_step.one_pass_loss

        def counted(*arguments: Any) -> Any:
            before = len(gpu.launches)
            found = one_pass_loss(*arguments)
            in_loss.append(len(gpu.launches) - before)
            return found

        monkeypatch.setattr(training_step, "one_pass_loss", counted)
        drafter, frozen = drafter_on_gpu(config, BF16)
        batch = host_batch(config, BF16)
        before = len(gpu.launches)
        with gpu.no_waiting():
            step(drafter, frozen, batch, num_steps=7, with_metrics=False)
        launches = gpu.launches[before:]
    assert len(launches) - sum(in_loss) <= LARGEST[recipe]
    assert not {aten.index_add_.default, aten.scatter_add_.default} & set(launches)
