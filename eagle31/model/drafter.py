"""The EAGLE 3.1 drafter.

The embedding is not part of it: it is the target's, frozen, and stays with whoever calls.
"""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from eagle31.kernels.elementwise import GatedLinear, RMSNorm
from eagle31.model.attention import DocumentSpan, attend_by_document, document_spans
from eagle31.model.config import DrafterConfig
from eagle31.model.gqa import GroupedQueryAttention
from eagle31.model.mla import LatentAttention
from eagle31.model.rope import Rotary


@dataclass
class LayerKeys:
    """One layer's rotated keys and values: step 0 of every row, later steps of the rolled-out rows."""

    keys: Tensor  # [T, Hkv, D]
    values: Tensor  # [T, Hkv, Dv]
    rollout_keys: list[Tensor] = field(default_factory=list)  # each [R, Hkv, D]
    rollout_values: list[Tensor] = field(default_factory=list)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = GatedLinear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x), self.up_proj(x))


class DrafterLayer(nn.Module):
    """The first layer reads the token's embedding beside the hidden state; later ones the state alone."""

    def __init__(self, config: DrafterConfig, layer_index: int) -> None:
        super().__init__()
        self.reads_embedding = layer_index == 0
        self.norm_before_residual = config.norm_before_residual
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps)
        if self.reads_embedding:
            self.hidden_norm = RMSNorm(width, eps=eps)
        attention = GroupedQueryAttention if config.mla is None else LatentAttention
        self.self_attn = attention(config, self.reads_embedding)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = MLP(config)

    def attention_input(self, state: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """What the projections read, and the residual. state, embeds: [N, H]."""
        normed, residual = self.state_input(state)
        if not self.reads_embedding:
            return normed, residual
        return torch.cat((self.input_layernorm(embeds), normed), dim=-1), residual

    def state_input(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the projections read beside the embedding, and the residual. state: [N, H]."""
        if not self.reads_embedding:
            return self.input_layernorm(state), state
        normed = self.hidden_norm(state)
        return normed, normed if self.norm_before_residual else state

    def output(self, attended: Tensor, residual: Tensor) -> Tensor:
        """attended: [R, Hq, Dv], residual: [R, H] -> [R, H]."""
        hidden = residual + self.self_attn.output(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Drafter(nn.Module):
    """Fusion, decoder layers, final norm, and the draft head unless it is frozen and kept outside."""

    fc_norm: nn.ModuleList

    def __init__(self, config: DrafterConfig, with_head: bool = True) -> None:
        super().__init__()
        self.config = config
        num_aux, target_width = len(config.aux_layer_ids), config.target_hidden_size
        if config.fc_norm:
            norms = [RMSNorm(target_width, eps=config.rms_norm_eps) for _ in range(num_aux)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(num_aux * target_width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(DrafterLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if with_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rotary_width, config.rope_parameters, config.max_position_embeddings)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """FC over the aux states, each normalised on its own under `fc_norm`. [T, A, Ht] -> [T, H]."""
        if self.config.fc_norm:
            normed = [norm(aux_hidden_states[:, i]) for i, norm in enumerate(self.fc_norm)]
            return self.fc(torch.cat(normed, dim=-1))
        return self.fc(aux_hidden_states.flatten(1))

    def first_step(
        self,
        hidden: Tensor,
        embeds: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        query_rows: Tensor,
        past: list[LayerKeys] | None = None,
    ) -> tuple[Tensor, list[LayerKeys]]:
        """Step 0: keys and values of every row, the output of `query_rows` alone.

        A row that no loss reads needs only its key and value in the last layer, so nothing else of it is
        computed there.

        Args:
            hidden: [N, H], fused states of the new rows.
            embeds: [N, H], embedding of each row's next token.
            position_ids: int64 [N], RoPE positions.
            document_ids: int64 [T], of the past and the new rows.
            query_rows: int64 [R], indices into the T rows, all of them new ones.
            past: keys and values of the T - N rows before.

        Returns:
            The decoder's output before the final norm [R, H], and the keys of all T rows.
        """
        num_past = past[0].keys.shape[0] if past else 0
        new_rows = torch.arange(num_past, num_past + hidden.shape[0], device=hidden.device)
        cos, sin = self.rotary(position_ids)
        scale = self.config.attention_scale
        contexts = []
        for index, layer in enumerate(self.decoder_layers):
            layer_input, residual = layer.attention_input(hidden, embeds)
            key, value = layer.self_attn.key_value(layer_input, cos, sin)
            if past:
                key = torch.cat((past[index].keys, key))
                value = torch.cat((past[index].values, value))
            contexts.append(LayerKeys(key, value))
            rows = query_rows if index == len(self.layers) - 1 else new_rows
            at = rows - num_past
            query = layer.self_attn.query(layer_input[at], cos[at], sin[at])
            spans = document_spans(rows, document_ids)
            attended = attend_by_document(query, key, value, spans, (), (), scale)
            hidden = layer.output(attended, residual[at])
        return hidden, contexts

    def next_step(
        self,
        state: Tensor,
        embeds: Tensor,
        position_ids: Tensor,
        spans: list[DocumentSpan],
        contexts: list[LayerKeys],
    ) -> Tensor:
        """A later step of the rolled-out rows; appends their keys and values to `contexts`.

        Args:
            state: [R, H], what the step before fed back.
            embeds: [R, H], embedding of the token this step starts from.
            position_ids: int64 [R], RoPE positions of this step.
            spans: step-0 keys each row may read.

        Returns:
            The decoder's output before the final norm [R, H].
        """
        cos, sin = self.rotary(position_ids)
        for layer, context in zip(self.decoder_layers, contexts, strict=True):
            layer_input, residual = layer.attention_input(state, embeds)
            key, value = layer.self_attn.key_value(layer_input, cos, sin)
            context.rollout_keys.append(key)
            context.rollout_values.append(value)
            query = layer.self_attn.query(layer_input, cos, sin)
            attended = attend_by_document(
                query,
                context.keys,
                context.values,
                spans,
                context.rollout_keys,
                context.rollout_values,
                self.config.attention_scale,
            )
            state = layer.output(attended, residual)
        return state

    @property
    def decoder_layers(self) -> list[DrafterLayer]:
        """`layers` by its type."""
        return cast(list[DrafterLayer], list(self.layers))

    def feed_back(self, output: Tensor, normed: Tensor) -> Tensor:
        """What the next step receives: the post-norm state under `norm_output`, else the pre-norm one."""
        return normed if self.config.norm_output else output
