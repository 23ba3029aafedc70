"""Training steps of small drafters on the pretended GPU."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from data.target.head import TargetHead
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch
from eagle31.training.step import DepthSums, rollout_loss, schedule_batch
from tests.eagle31.tiny import MLA, VOCAB, random_batch, tiny_config, tiny_drafter
from tests.pretended_gpu.backward import backward, grad
from tests.pretended_gpu.device import CUDA, pinned, to_gpu

NUM_STEPS = 3
LENGTHS = (30, 20, 40)
GQA: dict[str, Any] = {"head_dim": 8}
ATTENTION: dict[str, dict[str, Any]] = {"gqa": GQA, "mla": MLA}


def drafter_on_gpu(config: DrafterConfig, dtype: torch.dtype) -> tuple[Drafter, FrozenParts]:
    """Return a drafter and its frozen parts on the GPU."""
    drafter, frozen = tiny_drafter(config, dtype)
    assert isinstance(frozen.target_head, nn.Linear)
    head = TargetHead(nn.RMSNorm(config.target_hidden_size, dtype=dtype), frozen.target_head)
    to_gpu(drafter)
    to_gpu(head)
    ids = frozen.draft_target_ids
    return drafter, replace(
        frozen,
        target_head=head,
        embed_tokens=frozen.embed_tokens.to(CUDA),
        draft_target_ids=None if ids is None else ids.to(CUDA),
    )


def configuration(
    attention: str, *, pruned: bool = True, num_layers: int = 1, window: int | None = None
) -> DrafterConfig:
    size = 29 if pruned else VOCAB
    shape = {"draft_vocab_size": size, "num_hidden_layers": num_layers, "sliding_window": window}
    return tiny_config(**ATTENTION[attention], **shape)


def host_batch(config: DrafterConfig, dtype: torch.dtype, seed: int = 0) -> PackedBatch:
    """Return a row of three documents with two turns each, in pinned memory."""
    batch = random_batch(LENGTHS, config, seed=seed, padding=9, dtype=dtype)
    mask = (batch.position_ids % 15 >= 7) & (batch.document_ids >= 0)
    return pinned(replace(batch, loss_mask=mask))


def step(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    chunk_rows: int | None = None,
    num_steps: int = NUM_STEPS,
    **changes: Any,
) -> DepthSums:
    """Run forward and backward of one micro-batch that is still on the host."""
    schedule = schedule_batch(batch, num_steps, CUDA, drafter.config.key_reach, chunk_rows)
    on_gpu = batch.to(CUDA, frozen.embed_tokens.dtype, states=chunk_rows is None)
    options: dict[str, Any] = {"num_steps": num_steps, "step_decay": 0.8, "schedule": schedule} | changes
    with patch("torch.autograd.grad", grad):
        loss, sums = rollout_loss(drafter, frozen, on_gpu, **options)
    assert loss.device == CUDA
    backward(loss)
    return sums
