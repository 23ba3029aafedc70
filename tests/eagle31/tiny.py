"""Tiny drafters and random packed rows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle31.model.config import DrafterConfig, DSparkShape
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.kinds import new_drafter
from eagle31.model.shapes import MlaShape, NormedGqaShape
from eagle31.training.batch import PackedBatch

VOCAB = 61


def tiny_config(**changes: Any) -> DrafterConfig:
    config = DrafterConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=VOCAB,
        draft_vocab_size=29,
        target_hidden_size=20,
        aux_layer_ids=(0, 2, 5),
    )
    return replace(config, **changes)


QK_NORM: dict[str, Any] = {"attention": NormedGqaShape()}
# What vLLM's drafters have in addition, and others train.
BIASES: dict[str, Any] = {"norm_before_fc": True, "attention_bias": True, "mlp_bias": True}
EAGLE3: dict[str, Any] = {"fc_norm": False, "norm_output": False}
DSPARK: dict[str, Any] = {
    "attention": NormedGqaShape(),
    "num_hidden_layers": 2,
    "fc_norm": False,
    "norm_output": False,
    "dspark": DSparkShape(size=3, mask_token_id=7, markov_rank=5),
}
DFLASH: dict[str, Any] = DSPARK | {"dspark": DSparkShape(size=3, mask_token_id=7, markov_rank=0)}
# Changes to `tiny_config`: multi-head latent attention with values narrower than keys, and as wide.
MLA: dict[str, Any] = {
    "attention": MlaShape(
        q_lora_rank=10, kv_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6
    ),
    "num_key_value_heads": 4,
    "head_dim": 9,
}
WIDE_MLA = MLA | {"attention": replace(MLA["attention"], v_head_dim=9)}


class TinyHead(nn.Linear):
    """A target's head without a norm."""

    def rows(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        return partial(F.linear, weight=self.weight[token_ids])


def tiny_drafter(
    config: DrafterConfig, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Drafter, FrozenParts]:
    torch.manual_seed(seed)
    drafter = new_drafter(config)
    for parameter in drafter.parameters():
        # Norm weights too, so that a norm left out or applied twice changes the result.
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.3)
    head = TinyHead(config.target_hidden_size, config.vocab_size, bias=False).to(dtype).requires_grad_(False)
    ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    frozen = FrozenParts(
        embed_tokens=torch.randn(config.vocab_size, config.hidden_size, dtype=dtype),
        target_head=head,
        draft_target_ids=ids if config.pruned else None,
        lm_head=None,
    )
    return drafter.to(dtype), frozen


def random_batch(
    lengths: tuple[int, ...],
    config: DrafterConfig,
    seed: int = 0,
    padding: int = 0,
    dtype: Any = torch.float64,
) -> PackedBatch:
    """Make a row of documents of these lengths; the mask has random runs, as conversations have turns."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths) + padding
    flips = torch.rand(total, generator=generator) < 0.2
    mask = (flips.long().cumsum(0) % 2).bool()
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    positions = torch.cat([torch.arange(n) for n in (*lengths, padding)])
    aux_shape = (total, len(config.aux_layer_ids), config.target_hidden_size)
    scales = torch.tensor([1.0, 4.0, 20.0, 3.0, 2.0])[: aux_shape[1], None]
    return PackedBatch(
        input_ids=torch.randint(config.vocab_size, (total,), generator=generator),
        loss_mask=mask & (documents >= 0),
        document_ids=documents,
        position_ids=positions,
        aux_hidden_states=torch.randn(aux_shape, generator=generator, dtype=dtype) * scales,
        final_hidden_states=torch.randn(total, config.target_hidden_size, generator=generator, dtype=dtype),
    )
