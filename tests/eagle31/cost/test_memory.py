"""The memory of a step by formula; tests/train/plan/test_memory.py measures whole processes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31.cost.flops import StepCounts, count_step
from eagle31.cost.memory import StepMemory, step_memory
from eagle31.training.step import rollout_loss
from tests.eagle31.tiny import random_batch, tiny_config, tiny_drafter

NUM_STEPS, TOKENS = 3, 40


def planned(counts: StepCounts, itemsize: int, device: str, **changes: Any) -> StepMemory:
    return step_memory(
        tiny_config(**changes),
        counts,
        row_tokens=TOKENS,
        itemsize=itemsize,
        head_trained=True,
        rollout_chunk=None,
        device=device,
    )


@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 240}, {"num_attention_heads": 32}])
def test_activations_are_what_autograd_keeps(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config, torch.float32)
    batch = random_batch((TOKENS,), config, dtype=torch.float32)
    kept: dict[int, torch.UntypedStorage] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        rollout_loss(drafter, frozen, batch, num_steps=NUM_STEPS, step_decay=0.8)
    weights = {weight.untyped_storage().data_ptr() for weight in drafter.parameters()}
    found = sum(storage.nbytes() for where, storage in kept.items() if where not in weights)
    expected = planned(count_step(batch, NUM_STEPS, config), 4, "cpu", **changes).activations
    assert found == pytest.approx(expected, rel=0.02)


def test_a_head_has_five_gradients_of_each_row_in_the_backward_pass_of_flash_attention() -> None:
    """The output's, the output and its gradient for the kernel, and the query's from two products.

    The weight of `o_proj` has one too.
    """
    counts = StepCounts(keys=30, rows=(20, 19, 18), causal_pairs=0, teachers=20)
    few, many = (planned(counts, 2, "cuda", num_attention_heads=heads).backward for heads in (32, 64))
    head_dim, hidden_size, bytes_of_bf16 = 6, 16, 2
    assert many - few == 32 * head_dim * (5 * 20 + hidden_size) * bytes_of_bf16
