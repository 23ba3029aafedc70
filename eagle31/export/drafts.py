"""What a drafter drafts on a made-up context: its export is read back and has to draft the same."""

from typing import Any

import torch
from torch import Tensor

from eagle31.errors import UserError
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.training.batch import PackedBatch
from eagle31.training.rollout import rollout

# Relative to the largest logit. float32 sums in another order differ by about 1e-6, real mistakes by 1e-2.
TOLERANCE = 1e-4
_NUM_TOKENS, _NUM_ROWS, _NUM_STEPS = 48, 2, 4


def made_up_drafts(drafter: Drafter, embed_tokens: Tensor) -> dict[str, Any]:
    """Return the top ids, their logits and the logsumexp of some drafts, by step and row, for config.json.

    Args:
        drafter: float32 on the CPU, with weights rounded to the export's dtype.
        embed_tokens: [V, H].
    """
    logits = _logits(drafter, embed_tokens)
    top = logits.max(dim=-1)
    return {
        "token_ids": top.indices.tolist(),
        "logits": top.values.tolist(),
        "logsumexp": logits.logsumexp(-1).tolist(),
    }


def check_drafts(recorded: dict[str, Any], drafter: Drafter, embed_tokens: Tensor) -> None:
    """Raise UserError if a drafter, float32 on the CPU, does not draft what `made_up_drafts` recorded."""
    logits = _logits(drafter, embed_tokens)
    ids = torch.tensor(recorded["token_ids"])
    top, logsumexp = (torch.tensor(recorded[name]) for name in ("logits", "logsumexp"))
    at_top = (logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - top).abs()
    differences = torch.maximum(at_top, (logits.logsumexp(-1) - logsumexp).abs()).amax(dim=1)
    largest, allowed = differences.max(), TOLERANCE * max(1.0, float(top.abs().max()))
    if not largest <= allowed:  # false for NaN
        what = f"logits differ by {largest:.2g}, most at speculation step {int(differences.argmax()) + 1}"
        remedy = f"At most {allowed:.2g} is right: config.json or weights were changed; export again."
        raise UserError("drafts", what, remedy)


@torch.no_grad()
def draft_logits(
    drafter: Drafter, embed_tokens: Tensor, batch: PackedBatch, rows: Tensor, num_steps: int
) -> Tensor:
    """Return the draft logits of `rows` by the training path, float32 on the CPU [K, R, Vd]."""
    batch = batch.to(torch.device("cpu"), torch.float32)
    head = drafter.head(None)
    return torch.stack([state @ head.t() for state in rollout(drafter, embed_tokens, batch, rows, num_steps)])


def _logits(drafter: Drafter, embed_tokens: Tensor) -> Tensor:
    rows = torch.arange(_NUM_TOKENS - _NUM_STEPS - _NUM_ROWS - 1, _NUM_TOKENS - _NUM_STEPS - 1)
    return draft_logits(drafter, embed_tokens.float(), _context(drafter.config), rows, _NUM_STEPS)


def _context(config: DrafterConfig) -> PackedBatch:
    """Return random ids and states, half of them at the first positions and half at the last ones.

    A layer's states depend on its id, so that other ids show.
    """
    half = _NUM_TOKENS // 2
    last = max(half, config.max_position_embeddings - half - _NUM_STEPS)
    states = [_random(layer, config.target_hidden_size) for layer in (*config.aux_layer_ids, -1)]
    ids = torch.randint(0, config.vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    return PackedBatch(
        input_ids=ids,
        loss_mask=torch.ones(_NUM_TOKENS, dtype=torch.bool),
        document_ids=torch.zeros(_NUM_TOKENS, dtype=torch.int64),
        position_ids=torch.cat([torch.arange(half), last + torch.arange(half)]),
        aux_hidden_states=torch.stack(states[:-1], dim=1),
        final_hidden_states=states[-1],
    )


def _random(seed: int, width: int) -> Tensor:
    return torch.randn(_NUM_TOKENS, width, generator=torch.Generator().manual_seed(1 + seed))
