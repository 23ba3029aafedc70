"""A step by the kernels for GPUs, interpreted on the CPU, compared with the step by the CPU's operations."""

import tests.eagle31.kernels.interpreted  # noqa: F401 - before the kernels

# ruff: isort: split
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle31.kernels import dispatch, packed_attention
from eagle31.training import attention
from eagle31.training.step import rollout_loss, schedule_batch
from tests.eagle31.kernels.cuda_kernel import CudaKernel
from tests.eagle31.tiny import (
    BIASES,
    DSPARK,
    EAGLE3,
    MLA,
    QK_NORM,
    VOCAB,
    random_batch,
    tiny_config,
    tiny_drafter,
)

NUM_STEPS = 3
CPU = torch.device("cpu")
# changes to the configuration, rows of a chunk
CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "gqa": ({}, None),
    "mla in chunks, full vocabulary": (MLA | {"draft_vocab_size": VOCAB}, 3),
    "eagle 3, biases, norm before residual": (EAGLE3 | BIASES | {"norm_before_residual": True}, None),
    "two layers, norms of heads, biases, window": (
        QK_NORM | {"num_hidden_layers": 2, "attention_bias": True, "sliding_window": 2},
        None,
    ),
    "dspark in chunks": (DSPARK, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_cpus(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients(*CASES[case], torch.float64)
    monkeypatch.setattr(dispatch, "has_triton", lambda _: True)
    monkeypatch.setattr(attention, "_uses_packed_kernel", lambda *_: True)
    monkeypatch.setattr(packed_attention, "kernels", CudaKernel())
    found = gradients(*CASES[case], torch.float32)
    for name, exact in expected.items():
        assert float((found[name].double() - exact).norm() / exact.norm()) < 1e-4, name


def gradients(changes: dict[str, Any], chunk_rows: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the loss, the sums and the weights' gradients, from weights and states in float32."""
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config, torch.float32)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:  # a random state then keeps its scale
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    drafter = drafter.to(dtype)
    batch = random_batch((9, 4), config, seed=1, dtype=torch.float32).to(CPU, dtype)
    head = frozen.target_head
    assert isinstance(head, nn.Linear)
    moved = replace(frozen, embed_tokens=frozen.embed_tokens.to(dtype), target_head=head.to(dtype))
    schedule = schedule_batch(batch, NUM_STEPS, CPU, config.key_reach, chunk_rows)
    loss, sums = rollout_loss(drafter, moved, batch, num_steps=NUM_STEPS, step_decay=0.8, schedule=schedule)
    loss.backward()
    return {
        "loss": loss.detach(),
        "sums": sums.stacked(),
        **{name: p.grad for name, p in drafter.named_parameters()},
    }  # type: ignore[dict-item]
