"""The DSpark drafter, and DFlash: all tokens of a draft in one pass.

The keys and values of the context are functions of the fused captured states alone, in every layer. The
queries of a draft are its anchor, the last token that the target sampled, and mask tokens at the positions
after it. They attend to the context before the anchor and, in both directions, to each other. Query j gives
the logits of the token j + 1 positions after the anchor. The Markov head adds a function of the token before
it, so that tokens are chosen from left to right. In DFlash, without this head, a mask token gives the logits
of the token at its own position, so that a draft has one query more.

Sources: DSpark (arXiv 2607.05147), DFlash (arXiv 2602.06036); `qwen3_dspark.py` and `qwen3_dflash.py` of
vLLM, which serve them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle31.kernels.elementwise import RMSNorm
from eagle31.kernels.plain_attention import Attend, LayerKeys
from eagle31.model.attention import NO_PRODUCTS, Products
from eagle31.model.config import DrafterConfig, DSparkShape
from eagle31.model.drafter import Drafter, Prefill


class MarkovHead(nn.Module):
    """A bias of the draft logits that depends on the token before: markov_w2 @ markov_w1[token]."""

    def __init__(self, config: DrafterConfig, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)


class DSparkDrafter(Drafter):
    """Training, replay and decoding run `draft`, and pass in how to attend."""

    hidden_norm: RMSNorm

    def __init__(self, config: DrafterConfig, with_head: bool = True) -> None:
        norms = {"hidden_norm": RMSNorm(config.hidden_size, eps=config.rms_norm_eps)}
        super().__init__(config, with_head, norms, [False] * config.num_hidden_layers)
        if not self.shape.is_dflash:
            self.markov_head = MarkovHead(config, self.shape.markov_rank)

    @property
    def shape(self) -> DSparkShape:
        assert self.config.dspark is not None
        return self.config.dspark

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(aux_hidden_states.flatten(1)))

    def prefill(
        self, fused: Tensor, tokens: Tensor | Products, position_ids: Tensor, attend: Attend
    ) -> Prefill:
        rotation = self.rotary(position_ids)
        *keys, last = (layer.self_attn.compressed(fused, rotation) for layer in self.decoder_layers)
        return Prefill(fused[:, :0], [LayerKeys(*one) for one in keys], last)

    @property
    def prefills_rows_alone(self) -> bool:
        return True

    def head(self, frozen: nn.Linear | None) -> Tensor:
        """Return the draft head and the Markov head side by side, [Vd, H + r]."""
        weight = (frozen or self.lm_head).weight
        return weight if self.shape.is_dflash else torch.cat([weight, self.markov_head.markov_w2.weight], 1)

    def draft(
        self,
        anchors: Tensor,
        position_ids: Tensor,
        num_tokens: int,
        embed_tokens: Tensor,
        keys: Sequence[LayerKeys],
        attend: Attend,
    ) -> Tensor:
        """Return the states [R, num_tokens, H] of the drafts of R anchors.

        Args:
            anchors: int64 [R], token ids.
            position_ids: int64 [R], the anchors' RoPE positions.
            embed_tokens: [V, H], the frozen embedding.
            keys: each layer's keys and values of the context.
            attend: takes the queries of an anchor as further heads, in which those that share a key are next
                to each other.
        """
        num_queries = self.shape.num_queries(num_tokens)
        ids = anchors.new_full((len(anchors), num_queries), self.shape.mask_token_id)
        ids[:, 0] = anchors
        positions = position_ids[:, None] + torch.arange(num_queries, device=ids.device)
        rotation = self.rotary(positions.flatten())
        state = F.embedding(ids.flatten(), embed_tokens)
        num_kv_heads = self.config.num_key_value_heads

        def together(query: Tensor, layer_keys: LayerKeys) -> Tensor:
            by_group = query.unflatten(1, (num_kv_heads, -1)).unflatten(0, (-1, num_queries))
            folded = by_group.permute(0, 2, 3, 1, 4).flatten(1, 3)  # [R, Hkv * group * queries, D]
            attended = attend(folded, layer_keys).unflatten(1, (num_kv_heads, -1, num_queries))
            return attended.permute(0, 3, 1, 2, 4).reshape(query.shape)

        for layer, context in zip(self.decoder_layers, keys, strict=True):

            def with_drafts(key: Tensor, value: Tensor, context: LayerKeys = context) -> LayerKeys:
                by_step = (x.unflatten(0, (-1, num_queries)).unbind(1) for x in (key, value))
                for one in zip(*by_step, strict=True):
                    context = context.with_step(*one)
                return context

            state, _ = layer.step(state, NO_PRODUCTS, rotation, with_drafts, together)
        return self.norm(state).unflatten(0, (-1, num_queries))[:, num_queries - num_tokens :]

    def with_previous(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """Return what `head` reads, [R, H + r], of states [R, H] and the tokens before, int64 [R]."""
        if self.shape.is_dflash:
            return state
        return torch.cat([state, F.embedding(token_ids, self.markov_head.markov_w1.weight)], dim=1)
