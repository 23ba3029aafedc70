"""DSpark's step compared with a plain computation of each draft by itself: values and every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, supervised_drafts
from eagle31.training.reference import plain_alpha, plain_loss
from eagle31.training.step import rollout_loss, schedule_batch
from eagle31.training.teacher import full_teacher
from tests.eagle31.tiny import DFLASH, DSPARK, VOCAB, random_batch, tiny_config, tiny_drafter

NUM_STEPS, DECAY = 4, 0.7


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Apply RoPE. [N, heads, D], [N] -> the same shape."""
    half = x.shape[-1] // 2
    angles = position[:, None].double() / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def plain_draft(
    weights: dict[str, Tensor], config: DrafterConfig, embed_tokens: Tensor, batch: PackedBatch, row: int
) -> Tensor:
    """Return the states [K, H] of the draft at one row, from the tensors of the checkpoint."""
    shape, eps = config.dspark, config.rms_norm_eps
    assert shape is not None
    start = int((batch.document_ids == batch.document_ids[row]).long().argmax())
    fused = batch.aux_hidden_states[start : row + 1].flatten(1) @ weights["fc.weight"].t()
    context = normed(fused, weights["hidden_norm.weight"], eps)
    num_queries = NUM_STEPS + (shape.markov_rank == 0)
    ids = [int(batch.input_ids[row + 1])] + [shape.mask_token_id] * (num_queries - 1)
    x = embed_tokens[ids]
    theta, position = config.rope_theta, batch.position_ids[start : row + 1]
    own = position[-1] + 1 + torch.arange(num_queries)
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for layer in range(config.num_hidden_layers):
        of = {
            name.removeprefix(f"layers.{layer}."): w
            for name, w in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        read = normed(x, of["input_layernorm.weight"], eps)

        def heads_of(z: Tensor, name: str, number: int, of: dict[str, Tensor] = of) -> Tensor:
            return (z @ of[f"self_attn.{name}_proj.weight"].t()).view(len(z), number, width)

        query = turned(normed(heads_of(read, "q", heads), of["self_attn.q_norm.weight"], eps), own, theta)
        keys = torch.cat(
            [
                turned(normed(heads_of(z, "k", kv_heads), of["self_attn.k_norm.weight"], eps), at, theta)
                for z, at in ((context, position), (read, own))
            ]
        ).repeat_interleave(heads // kv_heads, 1)
        values = torch.cat([heads_of(z, "v", kv_heads) for z in (context, read)])
        values = values.repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) / width**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
        x = x + attended @ of["self_attn.o_proj.weight"].t()
        read = normed(x, of["post_attention_layernorm.weight"], eps)
        gated = F.silu(read @ of["mlp.gate_proj.weight"].t()) * (read @ of["mlp.up_proj.weight"].t())
        x = x + gated @ of["mlp.down_proj.weight"].t()
    return normed(x, weights["norm.weight"], eps)[num_queries - NUM_STEPS :]


def plain_logits(weights: dict[str, Tensor], state: Tensor, previous: Tensor) -> Tensor:
    """Return the logits of a draft's token, which the token before it changes."""
    logits = weights["lm_head.weight"] @ state
    if "markov_head.markov_w2.weight" in weights:
        first = weights["markov_head.markov_w1.weight"][previous]
        logits = logits + weights["markov_head.markov_w2.weight"] @ first
    return logits


def plain_step(drafter: Drafter, frozen: FrozenParts, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the loss, and the sums of loss, hits and acceptance by step [3, K]."""
    weights = dict(drafter.named_parameters())
    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, NUM_STEPS)
    total, sums = torch.zeros((), dtype=torch.float64), torch.zeros(3, NUM_STEPS, dtype=torch.float64)
    for row in torch.nonzero(supervised[:, 0]).squeeze(1).tolist():
        states = plain_draft(weights, drafter.config, frozen.embed_tokens, batch, row)
        for step in torch.nonzero(supervised[row]).squeeze(1).tolist():
            logits = plain_logits(weights, states[step], batch.input_ids[row + 1 + step])[None]
            with torch.no_grad():
                target = frozen.target_head(batch.final_hidden_states[row + 1 + step][None])
                teacher = full_teacher(target, frozen.draft_target_ids)
            loss = plain_loss(logits, teacher).sum()
            total = total + DECAY**step * loss
            found = [loss.detach(), (logits.argmax(-1) == teacher.greedy).sum()]
            sums[:, step] += torch.stack([*found, plain_alpha(logits, teacher).sum().detach()]).double()
    return total, sums


@pytest.mark.parametrize(
    ("changes", "chunk_rows"),
    [
        (DFLASH, None),
        (DFLASH, 3),
        ({}, None),
        ({"draft_vocab_size": VOCAB, "num_key_value_heads": 4}, None),
        ({}, 3),
        ({}, 20),
    ],
)
def test_float64_equals_each_draft_by_itself(changes: dict[str, Any], chunk_rows: int | None) -> None:
    config = tiny_config(**DSPARK | changes)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((9, 30, 1, 14), config, seed=5, padding=3)
    parameters = list(drafter.parameters())
    expected, expected_sums = plain_step(drafter, frozen, batch)
    expected_grads = torch.autograd.grad(expected, parameters)
    schedule = schedule_batch(batch, NUM_STEPS, chunk_rows=chunk_rows)
    found, sums = rollout_loss(
        drafter, frozen, batch, num_steps=NUM_STEPS, step_decay=DECAY, schedule=schedule
    )
    # RoPE's tables are float32.
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-8, atol=1e-8)
    of_sums = torch.stack([sums.loss, sums.agreement, sums.expected_acceptance])
    torch.testing.assert_close(of_sums, expected_sums, rtol=1e-7, atol=1e-7)
    assert float(sums.num_rows.sum()) > 20
    for grad, want in zip(torch.autograd.grad(found, parameters), expected_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-6, atol=1e-7 * max(1.0, float(want.abs().max())))
