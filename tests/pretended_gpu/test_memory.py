"""The planned memory of a step's forward pass compared with that of its tensors on a GPU, at real sizes."""

import pytest
import torch
from torch import nn

from data.target.head import TargetHead
from eagle31.cost.flops import count_step
from eagle31.cost.memory import step_memory
from eagle31.model.config import DrafterConfig, MlaShape
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch
from eagle31.training.step import rollout_loss, schedule_batch
from tests.pretended_gpu.pretended_gpu import CUDA, PretendedGpu, pinned, to_gpu

TOLERANCE = 0.1
BF16 = torch.bfloat16
GQA = DrafterConfig(
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    draft_vocab_size=32_000,
    target_hidden_size=4096,
    aux_layer_ids=(2, 18, 33),
)
KIMI_K2 = DrafterConfig(
    hidden_size=7168,
    intermediate_size=18_432,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=192,
    vocab_size=163_840,
    draft_vocab_size=163_840,
    target_hidden_size=7168,
    aux_layer_ids=(2, 30, 58),
    mla=MlaShape(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
)
# config, tokens, speculation steps, checkpointing, metrics
CASES = {
    "hidden size 4096, 7 steps": (GQA, 4096, 7, False, False),
    "Kimi K2, 8192 tokens, checkpointed": (KIMI_K2, 8192, 4, True, False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_forward_pass_takes_the_planned_memory(case: str) -> None:
    config, num_tokens, num_steps, checkpointed, metrics = CASES[case]
    with torch.device("meta"):
        drafter = Drafter(config).to(BF16)
        lm_head = nn.Linear(config.target_hidden_size, config.vocab_size, bias=False)
        head = TargetHead(nn.RMSNorm(config.target_hidden_size), lm_head).to(BF16)
    rows = torch.arange(num_tokens)
    with PretendedGpu() as gpu:
        to_gpu(drafter)
        to_gpu(head)
        embedding = torch.zeros(config.vocab_size, config.hidden_size, dtype=BF16, device=CUDA)
        ids = torch.arange(config.draft_vocab_size).to(CUDA) if config.pruned else None
        frozen = FrozenParts(embedding, head, ids, None)
        frozen.draft_logits(torch.zeros(1, config.target_hidden_size, dtype=BF16, device=CUDA))
        # The states are made on the GPU: as real tensors on the host they would take memory.
        host = pinned(PackedBatch(rows, rows >= 0, rows * 0, rows, torch.zeros(1), torch.zeros(1)))
        shape = num_tokens, len(config.aux_layer_ids), config.target_hidden_size
        schedule = schedule_batch(host, num_steps, CUDA)
        with gpu.counted_memory() as memory:
            moved = host.to(CUDA)
            aux = torch.zeros(shape, dtype=BF16, device=CUDA)
            final = torch.zeros(num_tokens, config.target_hidden_size, dtype=BF16, device=CUDA)
            batch = PackedBatch(
                moved.input_ids, moved.loss_mask, moved.document_ids, moved.position_ids, aux, final
            )
            loss, _ = rollout_loss(
                drafter,
                frozen,
                batch,
                num_steps=num_steps,
                step_decay=0.8,
                schedule=schedule,
                with_metrics=metrics,
                activation_checkpointing=checkpointed,
            )
            found = memory.peak_bytes
        assert loss.device == CUDA
    plan = step_memory(
        config,
        count_step(host, num_steps),
        row_tokens=num_tokens,
        itemsize=BF16.itemsize,
        head_trained=True,
        activation_checkpointing=checkpointed,
        device="cuda",
        with_metrics=metrics,
    )
    # The plan has two rows on the device, one of them for the next step.
    planned = plan.batch // 2 + plan.activations + plan.state_gradients + plan.head_gradient + plan.loss_chunk
    assert planned == pytest.approx(found, rel=TOLERANCE), plan
