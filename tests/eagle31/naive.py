"""The training step by its definition: every row at every step, one attention mask, all logits."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.shapes import MlaShape, NormedGqaShape
from eagle31.training.batch import PackedBatch
from eagle31.training.step import DepthSums


def weights_of_layer(weights: Mapping[str, Tensor], layer: int) -> Callable[..., Tensor]:
    def weight(name: str, kind: str = "weight") -> Tensor:
        name = f"layers.{layer}.{name}.{kind}"
        return weights[name] if kind == "weight" else weights.get(name, torch.zeros(()))

    return weight


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


def after_attention(residual: Tensor, attended: Tensor, weight: Callable[..., Tensor], eps: float) -> Tensor:
    """Return a layer's output. residual: [N, H], attended: [N, Hq, Dv]."""
    hidden = residual + linear(attended.flatten(1), weight, "self_attn.o_proj")
    normed = rms(hidden, weight("post_attention_layernorm"), eps)
    gated = F.silu(linear(normed, weight, "mlp.gate_proj")) * linear(normed, weight, "mlp.up_proj")
    return hidden + linear(gated, weight, "mlp.down_proj")


def naive_states(drafter: Drafter, frozen: FrozenParts, batch: PackedBatch, num_steps: int) -> list[Tensor]:
    """Return EAGLE's post-norm states of every row, a tensor [T, H] per step."""
    weights, config = dict(drafter.named_parameters()), drafter.config
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
        embeds = F.embedding(shift(batch.input_ids, 1 + step), frozen.embed_tokens)
        positions = batch.position_ids + step
        seen = causal & (index[:, None] + step - index[None] < window)
        own = [diagonal & (step - earlier < window) for earlier in range(1, step + 1)]
        mask = torch.cat([seen, *own], dim=1)
        for layer in range(config.num_hidden_layers):
            weight, residual = weights_of_layer(weights, layer), state
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
            attended = torch.einsum("hqk,khd->qhd", probs, torch.cat(values))
            state = after_attention(residual, attended, weight, eps)
        normed = rms(state, weights["norm.weight"], eps)
        outputs.append(normed)
        state = normed if config.norm_output else state
    return outputs


def dspark_states(
    weights: Mapping[str, Tensor],
    config: DrafterConfig,
    frozen: FrozenParts,
    batch: PackedBatch,
    row: int,
    num_steps: int,
) -> Tensor:
    """Return the states [K, H] of DSpark's or DFlash's draft at one row."""
    shape, eps = config.dspark, config.rms_norm_eps
    assert shape is not None
    start = int((batch.document_ids == batch.document_ids[row]).long().argmax())
    context = batch.aux_hidden_states[start : row + 1].flatten(1) @ weights["fc.weight"].T
    context = rms(context, weights["hidden_norm.weight"], eps)
    num_queries = num_steps + (shape.markov_rank == 0)
    ids = [int(batch.input_ids[row + 1])] + [shape.mask_token_id] * (num_queries - 1)
    state, positions = frozen.embed_tokens[ids], batch.position_ids[start : row + 1]
    own = positions[-1] + 1 + torch.arange(num_queries)
    for layer in range(config.num_hidden_layers):
        weight = weights_of_layer(weights, layer)
        _, *of_context = grouped_heads(context, weight, config, positions)
        query, *of_draft = grouped_heads(rms(state, weight("input_layernorm"), eps), weight, config, own)
        keys, values = (torch.cat(both) for both in zip(of_context, of_draft, strict=True))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * config.head_dim**-0.5
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        state = after_attention(state, attended, weight, eps)
    return rms(state, weights["norm.weight"], eps)[num_queries - num_steps :]


def naive_logits(
    drafter: Drafter, frozen: FrozenParts, batch: PackedBatch, num_steps: int
) -> Sequence[Tensor]:
    """Return the logits of every row, [T, Vd] for each step; DSpark's where a draft is supervised."""
    weights, config = dict(drafter.named_parameters()), drafter.config
    head = (frozen.lm_head or drafter.lm_head).weight
    if config.dspark is None:
        return [state @ head.T for state in naive_states(drafter, frozen, batch, num_steps)]
    unsupervised = head.new_zeros(num_steps, config.hidden_size)
    states = [
        dspark_states(weights, config, frozen, batch, row, num_steps)
        if is_supervised(batch, row, 0)
        else unsupervised
        for row in range(len(batch.input_ids))
    ]
    logits = [state @ head.T for state in torch.stack(states, dim=1)]
    if config.dspark.is_dflash:
        return logits
    first, second = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    return [one + first[shift(batch.input_ids, 1 + step)] @ second.T for step, one in enumerate(logits)]


def naive_loss(
    drafter: Drafter, frozen: FrozenParts, batch: PackedBatch, *, num_steps: int, step_decay: float
) -> tuple[Tensor, DepthSums]:
    """Return the results of `eagle31.training.step.rollout_loss`."""
    target = frozen.target_head(batch.final_hidden_states)
    ids = frozen.draft_target_ids if frozen.draft_target_ids is not None else torch.arange(target.shape[1])
    p, greedy = target.softmax(-1)[:, ids], target.argmax(-1)
    teacher = target[:, ids].softmax(-1)
    total, sums = torch.zeros((), dtype=target.dtype), []
    for step, logits in enumerate(naive_logits(drafter, frozen, batch, num_steps)):
        rows = torch.tensor([row for row in range(len(logits)) if is_supervised(batch, row, step)]).long()
        read, log_q = rows + 1 + step, logits[rows].log_softmax(-1)
        loss = -(teacher[read] * log_q).sum()
        weighted = step_decay**step * loss
        total = total + weighted
        hits = (ids[log_q.argmax(-1)] == greedy[read]).sum()
        alpha = torch.minimum(p[read], log_q.exp()).sum()
        sums.append(
            torch.stack([x.detach().double() for x in (torch.tensor(len(rows)), loss, hits, alpha, weighted)])
        )
    return total, DepthSums(*torch.stack(sums, dim=1))
