"""A chunk of the loss on a GPU takes the memory that the plan says."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle31.cost.flops import count_step
from eagle31.cost.memory import step_memory
from eagle31.training.fused_loss import one_pass_loss
from eagle31.training.step import schedule_batch
from eagle31.training.teacher import teacher_of
from tests.eagle31.tiny import random_batch, tiny_config
from tests.pretended_gpu.device import CUDA, PretendedGpu
from tests.pretended_gpu.live_bytes import LiveBytes
from tests.pretended_gpu.steps import GQA, NUM_STEPS, drafter_on_gpu

CONFIG = tiny_config(**GQA, vocab_size=16_384, draft_vocab_size=4096)


@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("with_metrics", [True, False])
def test_a_chunk_takes_the_memory_that_the_plan_says(pruned: bool, with_metrics: bool) -> None:
    config = replace(CONFIG, hidden_size=256) if pruned else replace(CONFIG, draft_vocab_size=16_384)
    with PretendedGpu():
        drafter, frozen = drafter_on_gpu(config, torch.bfloat16)
        batch = random_batch((400,), config, dtype=torch.bfloat16)
        counts = count_step(batch, NUM_STEPS, config)
        (chunk,) = schedule_batch(batch, NUM_STEPS, CUDA).chunks
        on_gpu = batch.to(CUDA, torch.bfloat16)
        teacher = teacher_of(frozen, on_gpu, chunk, with_metrics)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA, "requires_grad": True}
        states = [torch.empty(rows, config.hidden_size, **options) for rows in counts.rows]
        with LiveBytes() as live:
            one_pass_loss(states, drafter.lm_head.weight, teacher, chunk, [1.0] * NUM_STEPS, 10_000)
    sizes: dict[str, Any] = {"row_tokens": 400, "itemsize": 2, "head_trained": True, "rollout_chunk": None}
    planned = step_memory(config, counts, **sizes, device="cuda", with_metrics=with_metrics)
    expected = planned.loss_part + planned.head_gradient + planned.state_gradients
    assert live.peak == pytest.approx(expected, rel=0.03)
