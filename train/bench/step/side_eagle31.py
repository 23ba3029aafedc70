"""eagle31's step, for `worker.py`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[3]


def build(
    spec: dict[str, Any], weights: dict[str, Tensor], rows: list[dict[str, Tensor]], device: torch.device
) -> tuple[nn.Module, Callable[[int], Tensor], dict[str, Any]]:
    """Return the drafter and its step; the head is trained or frozen according to `spec["head"]`."""
    sys.path.insert(0, str(ROOT))
    from data.target.head import TargetHead
    from eagle31.model.drafter import Drafter
    from eagle31.model.frozen import FrozenParts
    from eagle31.training.batch import PackedBatch
    from eagle31.training.step import rollout_loss
    from train.bench.step.shapes import Shape

    shape = Shape(**spec["shape"])
    config = shape.config()
    frozen_head = spec["head"] == "frozen"
    trained = {name: tensor for name, tensor in weights.items() if not name.startswith(("target_", "draft_"))}
    head = trained.pop("lm_head.weight") if frozen_head else None
    with torch.device("meta"):
        drafter = Drafter(config, with_head=not frozen_head)
    drafter.load_state_dict(trained, assign=True)
    drafter.requires_grad_(True)
    norm = nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps, device="meta")
    norm.load_state_dict({"weight": weights["target_norm"]}, assign=True)
    frozen = FrozenParts(
        embed_tokens=weights["target_embed"],
        target_head=TargetHead(norm, linear(weights["target_head"])),
        draft_target_ids=weights["draft_target_ids"],
        lm_head=None if head is None else linear(head),
    )
    batches = [PackedBatch(**row) for row in rows]

    def step(index: int) -> Tensor:
        # The training loop skips the metrics except at logging steps. The peers' teachers also cover only the
        # draft vocabulary.
        loss, sums = rollout_loss(
            drafter,
            frozen,
            batches[index],
            num_steps=shape.num_steps,
            step_decay=shape.step_decay,
            with_metrics=False,
        )
        scaled = loss / sums.num_rows[0]
        scaled.backward()
        return scaled.detach()

    return drafter, step, {"version": "this checkout"}


def linear(weight: Tensor) -> nn.Linear:
    """Return a frozen linear layer around `weight` [out, in]."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.load_state_dict({"weight": weight}, assign=True)
    return module.requires_grad_(False)
