"""Runs under torchrun: the gradients of a row that all ranks share, against those of the whole row."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from eagle31.training.batch import supervised_drafts
from eagle31.training.schedule import DraftCosts, row_shares, schedule_rollout
from eagle31.training.step import rollout_loss
from tests.eagle31.tiny import MLA, random_batch, tiny_config, tiny_drafter

VARIANTS = {"gqa": {}, "mla": MLA, "window": {"sliding_window": 3}}
NUM_STEPS = 5


def shared_gradients(group: dist.ProcessGroup) -> dict[str, float]:
    """Return for each variant by how much gradients differ at most, over the largest element of each."""
    return {
        f"{name} {row}": _difference(group, variant, row)
        for name, variant in VARIANTS.items()
        for row in ("documents", "no draft")
    }


def _difference(group: dist.ProcessGroup, variant: dict, row: str) -> float:
    config = tiny_config(**variant)
    drafter, frozen = tiny_drafter(config)
    weights = list(drafter.parameters())
    batch = random_batch((70, 5, 90) if row == "documents" else (3,), config, seed=3, padding=4)

    def differentiated(**settings: Any) -> list[torch.Tensor]:
        loss, sums = rollout_loss(drafter, frozen, batch, num_steps=NUM_STEPS, step_decay=0.8, **settings)
        grads = torch.autograd.grad(loss, weights, materialize_grads=True)
        return [loss.detach(), sums.stacked(), *grads]

    whole = differentiated()
    costs = DraftCosts(9.0, 1.0, config.sliding_window)
    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, NUM_STEPS)
    of_row = supervised, batch.document_ids
    share = row_shares(*of_row, config.key_reach, costs, group.size())[group.rank()]
    schedule = schedule_rollout(*of_row, key_reach=config.key_reach, chunk_rows=16, share=share)
    found = differentiated(schedule=schedule, row_group=group)
    for one in found:
        dist.all_reduce(one, group=group)
    return max(
        float((one - want).abs().max() / want.abs().max().clamp(min=1e-9))
        for one, want in zip(found, whole, strict=True)
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    for name, difference in shared_gradients(dist.group.WORLD).items():
        assert difference < 1e-10, (name, difference)
    dist.destroy_process_group()
