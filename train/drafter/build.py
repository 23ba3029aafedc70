"""Building the drafter, and the frozen tensors that it needs."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from data.target.parts import TargetParts
from eagle31.export.read import LoadedExport
from eagle31.model.drafter import Drafter
from eagle31.model.eagle import EagleDrafter
from eagle31.model.frozen import FrozenParts, project_width
from eagle31.model.kinds import new_drafter
from eagle31.model.vocab import DraftVocab
from train.config.run import RunConfig, training_seed
from train.drafter.chosen import ChosenDrafter
from train.drafter.published import start_from


def build_drafter(
    config: RunConfig,
    chosen: ChosenDrafter,
    vocab: DraftVocab,
    projected: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Drafter, FrozenParts]:
    """Return the drafter before its first step (float32, on the CPU) and its frozen tensors on `device`.

    Random weights depend on the seed alone.

    Args:
        projected: see `frozen_rows`.
        dtype: of the frozen tensors.
    """
    parts, initial, train_lm_head = chosen.target.parts, chosen.initial, config.drafter.train_lm_head
    shape = chosen.config(len(vocab.d2t))
    torch.manual_seed(training_seed(config))
    drafter = new_drafter(shape, with_head=train_lm_head)
    initialize(drafter)
    if initial is not None:
        start_from(drafter, initial.drafter)
    embed_tokens, head_rows = frozen_rows(vocab, parts, initial, projected)
    lm_head = (
        drafter.lm_head if train_lm_head else nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
    )
    with torch.no_grad():
        lm_head.weight.copy_(head_rows)
    lm_head.requires_grad_(train_lm_head)
    head = parts.head
    if dtype is torch.float32:
        head = head.float()
    frozen = FrozenParts(
        embed_tokens=embed_tokens.to(device, dtype),
        target_head=head.to(device),
        draft_target_ids=vocab.target_ids.to(device) if shape.pruned else None,
        lm_head=None if train_lm_head else lm_head.to(device, dtype),
    )
    return drafter, frozen


def frozen_rows(
    vocab: DraftVocab, parts: TargetParts, initial: LoadedExport | None, projected: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the embedding [V, H] in the target's dtype, and the draft head's first rows float32 [Vd, H].

    Both are the target's. A checkpoint to start from brings its own head, and its own embedding where the
    widths differ, because its weights would not fit another projection.

    Args:
        projected: `projected_rows` as the training keeps them; empty where the widths are the same.
    """
    if initial is not None:
        same_width = initial.drafter.config.hidden_size == parts.hidden_size
        embed_tokens = parts.embed_tokens if same_width else initial.embed_tokens
        return embed_tokens, initial.drafter.lm_head.weight.detach()
    if projected:
        return projected["embed_tokens"], projected["lm_head"]
    return parts.embed_tokens, _head_rows(vocab, parts)


def projected_rows(width: int, vocab: DraftVocab, parts: TargetParts) -> dict[str, Tensor]:
    """Return `embed_tokens` and `lm_head` of `frozen_rows`, projected to another width.

    The directions of a projection depend on the number of threads, so that it is made once and kept.
    """
    rows = {"embed_tokens": parts.embed_tokens, "lm_head": _head_rows(vocab, parts)}
    return {name: project_width(one, width).contiguous() for name, one in rows.items()}


def _head_rows(vocab: DraftVocab, parts: TargetParts) -> Tensor:
    """Return the target's rows with its scale, which no engine applies to a drafter's logits."""
    return parts.head.weight[vocab.target_ids].float() * parts.head.scale


def initialize(drafter: Drafter, std: float = 0.02) -> None:
    """Draw weights of products and embeddings from a normal distribution, as Llama does; norms stay one.

    An EAGLE drafter of the target's width begins with the deepest captured state as its fused state, which
    its residual stream leads to a copy of the target's head. docs/study.md has an ablation.
    """
    for module in drafter.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
    width = drafter.config.target_hidden_size
    if isinstance(drafter, EagleDrafter) and drafter.config.hidden_size == width:
        nn.init.zeros_(drafter.fc.weight)
        nn.init.eye_(drafter.fc.weight[:, -width:])
