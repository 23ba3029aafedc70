"""Acceptance length by replay on held-out prompts, over all ranks."""

from collections.abc import Sequence

import torch

from data.batches.loader import pack_row
from data.batches.packing import pack_epoch
from data.samples import CapturedSample
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.replay import replay
from eagle31.training.batch import PackedBatch
from train.distributed import World, sum_over_ranks
from train.trainer.model_engine import TrainedModule


class ReplayValidation:
    """Held-out samples whose answers the target wrote greedily, packed and shared out once."""

    def __init__(
        self, samples: Sequence[CapturedSample], row_tokens: int, max_draft_tokens: int, world: World
    ) -> None:
        self.max_draft_tokens = max_draft_tokens
        lengths = [len(sample.input_ids) for sample in samples]
        rows = pack_epoch(lengths, row_tokens, seed=0, epoch=0)
        # Every rank runs equally many forwards: under ZeRO 3 each of them is collective.
        self.num_padding = -len(rows) % world.size
        mine = [*rows, *rows[: self.num_padding]][world.rank :: world.size]
        self.real = [
            index < len(rows) for index in range(world.rank, len(rows) + self.num_padding, world.size)
        ]
        self.batches: list[PackedBatch] = [
            pack_row([samples[i] for i in row], sum(lengths[i] for i in row)) for row in mine
        ]

    @torch.no_grad()
    def run(
        self, module: TrainedModule, device: torch.device, dtype: torch.dtype
    ) -> dict[int, AcceptanceStats]:
        """By draft length 1..max_draft_tokens, summed over all ranks. Every rank calls."""
        num = self.max_draft_tokens
        totals = torch.zeros(num, 1 + num, dtype=torch.float64, device=device)
        for batch, real in zip(self.batches, self.real, strict=True):
            hits, counted = module.hits(batch.to(device, dtype), num)
            if not real:
                continue
            for k in range(1, num + 1):
                stats = replay(hits, counted, k)
                totals[k - 1, 0] += stats.num_drafts
                totals[k - 1, 1 : 1 + k] += torch.tensor(stats.accepted_per_position, device=device)
        counts = sum_over_ranks(totals).long().tolist()
        return {
            k: AcceptanceStats(k, counts[k - 1][0], tuple(counts[k - 1][1 : 1 + k]))
            for k in range(1, num + 1)
        }
