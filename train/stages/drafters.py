"""Building the drafter and what it uses of the target."""

import torch
from torch import Tensor, nn

from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts, project_width
from eagle31.model.vocab import DraftVocab
from train.context import RunContext
from train.drafter.published import start_from


def draft_rows(rows: Tensor, vocab: DraftVocab) -> Tensor:
    """The target's rows of the draft vocabulary. [V, Ht] -> [Vd, Ht]."""
    return rows[vocab.target_ids]


def build_drafter(context: RunContext, vocab: DraftVocab) -> tuple[Drafter, FrozenParts]:
    """The drafter before its first step, and what stays frozen beside it.

    Weights depend on the seed alone, or are those of the checkpoint to start from.
    """
    config = context.drafter_config(len(vocab.d2t))
    trained_head = context.config.drafter.train_lm_head
    torch.manual_seed(context.config.seed)
    drafter = Drafter(config, with_head=trained_head)
    initialize(drafter)
    if context.initial is not None:
        start_from(drafter, context.initial.drafter)
    embed_tokens, head_rows = frozen_rows(context, vocab)
    lm_head = (
        drafter.lm_head
        if trained_head
        else nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
    )
    with torch.no_grad():
        lm_head.weight.copy_(head_rows)
    lm_head.requires_grad_(trained_head)
    device, dtype = context.world.device, context.dtype
    head = context.parts.head
    if dtype is torch.float32:
        head = head.float()
    frozen = FrozenParts(
        embed_tokens=embed_tokens.to(device, dtype),
        target_head=head.to(device),
        draft_target_ids=vocab.target_ids.to(device) if config.pruned else None,
        lm_head=None if trained_head else lm_head.to(device, dtype),
    )
    return drafter, frozen


def frozen_rows(context: RunContext, vocab: DraftVocab) -> tuple[Tensor, Tensor]:
    """The embedding [V, H] in the target's dtype, and the draft head's first rows float32 [Vd, H].

    They are the target's, in the drafter's width. A checkpoint to start from brings its own head, and its own
    embedding where the widths differ, as another projection would not fit its weights.
    """
    parts, width = context.parts, context.drafter_config(len(vocab.d2t)).hidden_size
    if context.initial is None:
        head_rows = project_width(draft_rows(parts.head.weight, vocab).float(), width)
        return project_width(parts.embed_tokens, width), head_rows
    own_width = width != parts.hidden_size
    embed_tokens = context.initial.embed_tokens if own_width else parts.embed_tokens
    return embed_tokens, context.initial.drafter.lm_head.weight.detach()


def initialize(drafter: Drafter, std: float = 0.02) -> None:
    """Normal weights as in Llama; norms are one."""
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
