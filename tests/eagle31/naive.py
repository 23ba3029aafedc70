"""The training step by its definition: every row at every step, one attention mask, all logits."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.shapes import MlaShape, NormedGqaShape
from eagle31.training.batch import PackedBatch


def linear(x: Tensor, weight: Callable[..., Tensor], name: str) -> Tensor:
    return x @ weight(name).T + weight(name, kind="bias")


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate the pairs (i, i + D/2). x: [T, heads, D]."""
    half = x.shape[-1] // 2
    # The frequencies are float32 in transformers and vLLM.
    frequencies = (1.0 / theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))).float()
    angles = (positions[:, None].float() * frequencies).to(x.dtype)[:, None]
    cos, sin = angles.float().cos().to(x.dtype), angles.float().sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope_pairs(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate the pairs (2i, 2i + 1), the order of DeepSeek's checkpoints. x: [T, heads, D]."""
    frequencies = (1.0 / theta ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])).float()
    angles = positions[:, None].float() * frequencies
    turn = torch.complex(angles.cos().to(x.dtype), angles.sin().to(x.dtype))[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def grouped_heads(
    inputs: Tensor, weight: Callable[[str], Tensor], config: DrafterConfig, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [T, Hq, D] of grouped-query attention, keys and values repeated."""
    q, k, v = (
        linear(inputs, weight, f"self_attn.{name}_proj").unflatten(-1, (-1, config.head_dim))
        for name in "qkv"
    )
    if isinstance(config.attention, NormedGqaShape):
        q, k = (
            rms(x, weight(f"self_attn.{name}_norm"), config.rms_norm_eps) for x, name in ((q, "q"), (k, "k"))
        )
    q, k = (rope(x, positions, config.rope_theta) for x in (q, k))
    repeat = config.num_attention_heads // config.num_key_value_heads
    return q, k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)


def latent_heads(
    inputs: Tensor, weight: Callable[[str], Tensor], config: DrafterConfig, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [T, Hq, D] and values [T, Hq, Dv] of multi-head latent attention."""
    shape = config.attention
    assert isinstance(shape, MlaShape)
    nope, heads = shape.qk_nope_head_dim, (config.num_attention_heads, -1)
    latent = inputs @ weight("self_attn.q_a_proj").T
    q = rms(latent, weight("self_attn.q_a_layernorm"), config.rms_norm_eps)
    q = (q @ weight("self_attn.q_b_proj").T).unflatten(-1, heads)
    q = torch.cat((q[..., :nope], rope_pairs(q[..., nope:], positions, config.rope_theta)), -1)
    latent = inputs @ weight("self_attn.kv_a_proj_with_mqa").T
    rank = shape.kv_lora_rank
    shared = rope_pairs(latent[:, None, rank:], positions, config.rope_theta)
    kv = rms(latent[:, :rank], weight("self_attn.kv_a_layernorm"), config.rms_norm_eps)
    kv = (kv @ weight("self_attn.kv_b_proj").T).unflatten(-1, heads)
    k = torch.cat((kv[..., :nope], shared.repeat(1, config.num_attention_heads, 1)), -1)
    return q, k, kv[..., nope:]


def is_supervised(batch: PackedBatch, row: int, step: int) -> bool:
    last = row + 2 + step
    if last >= len(batch.input_ids) or batch.document_ids[row] != batch.document_ids[last]:
        return False
    return bool(batch.loss_mask[row + 1 : last + 1].all())


def shift(x: Tensor, by: int) -> Tensor:
    """Return x[t + by] at t, and the last entry where there is none."""
    index = (torch.arange(len(x)) + by).clamp(max=len(x) - 1)
    return x[index]


def naive_states(
    drafter: Drafter, config: DrafterConfig, frozen: FrozenParts, batch: PackedBatch, num_steps: int
) -> list[Tensor]:
    """Return the post-norm states of every row, a tensor [T, H] per step."""
    weights = dict(drafter.named_parameters())
    eps, length = config.rms_norm_eps, len(batch.input_ids)
    states = batch.aux_hidden_states
    if config.norm_before_fc:
        states = rms(states.flatten(1), weights["input_norm.weight"], eps).view_as(states)
    aux = list(states.unbind(1))
    if config.fc_norm:
        aux = [rms(x, weights[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(aux)]
    state = torch.cat(aux, -1) @ weights["fc.weight"].T

    index = torch.arange(length)
    same = batch.document_ids[:, None] == batch.document_ids[None]
    causal = same & (index[:, None] >= index[None])
    diagonal = torch.eye(length, dtype=torch.bool)
    # Row t's query of step k is at position t + k, and so is its key of that step.
    window = config.sliding_window or length + num_steps
    cached: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(config.num_hidden_layers)]
    outputs = []
    for step in range(num_steps):
        next_ids = batch.input_ids.roll(-1) if step == 0 else shift(batch.input_ids, 1 + step)
        embeds = F.embedding(next_ids, frozen.embed_tokens)
        positions = batch.position_ids + step
        seen = causal & (index[:, None] + step - index[None] < window)
        own = [diagonal & (step - earlier < window) for earlier in range(1, step + 1)]
        mask = torch.cat([seen, *own], dim=1)
        for layer in range(config.num_hidden_layers):

            def weight(name: str, layer: int = layer, kind: str = "weight") -> Tensor:
                name = f"layers.{layer}.{name}.{kind}"
                return weights[name] if kind == "weight" else weights.get(name, torch.zeros(()))

            residual = state
            if layer == 0:
                normed = rms(state, weight("hidden_norm"), eps)
                if config.norm_before_residual:
                    residual = normed
                inputs = torch.cat((rms(embeds, weight("input_layernorm"), eps), normed), -1)
            else:
                inputs = rms(state, weight("input_layernorm"), eps)
            heads = latent_heads if isinstance(config.attention, MlaShape) else grouped_heads
            q, k, v = heads(inputs, weight, config, positions)
            keys, values = cached[layer]
            keys.append(k)
            values.append(v)
            scores = torch.einsum("qhd,khd->hqk", q, torch.cat(keys)) * q.shape[-1] ** -0.5
            probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", probs, torch.cat(values)).flatten(1)
            hidden = residual + linear(attended, weight, "self_attn.o_proj")
            normed = rms(hidden, weight("post_attention_layernorm"), eps)
            gated = F.silu(linear(normed, weight, "mlp.gate_proj")) * linear(normed, weight, "mlp.up_proj")
            state = hidden + linear(gated, weight, "mlp.down_proj")
        normed = rms(state, weights["norm.weight"], eps)
        outputs.append(normed)
        state = normed if config.norm_output else state
    return outputs


def naive_loss(
    drafter: Drafter,
    config: DrafterConfig,
    frozen: FrozenParts,
    batch: PackedBatch,
    num_steps: int,
    decay: float,
) -> Tensor:
    total = torch.zeros((), dtype=batch.aux_hidden_states.dtype)
    teacher_logits = frozen.target_head(batch.final_hidden_states)
    if frozen.draft_target_ids is not None:
        teacher_logits = teacher_logits[:, frozen.draft_target_ids]
    teacher = teacher_logits.softmax(-1)
    for step, normed in enumerate(naive_states(drafter, config, frozen, batch, num_steps)):
        log_q = (normed @ drafter.lm_head.weight.T).log_softmax(-1)
        for row in range(len(batch.input_ids)):
            if is_supervised(batch, row, step):
                total = total - decay**step * (teacher[row + 1 + step] * log_q[row]).sum()
    return total
