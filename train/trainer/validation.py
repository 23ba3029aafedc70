"""Measurements during training on held-out prompts: acceptance length by replay, and drift."""

from typing import Any

import numpy as np
import torch

from data.batches.row_order import pack_epoch
from data.batches.rows import pack_row
from data.progress import tracked
from data.samples import CapturedSample, HiddenStateSource
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.replay import replay
from eagle31.training.batch import PackedBatch
from eagle31.training.drift import choose_rows
from train.distributed import World, sum_over_ranks
from train.trainer.engine import TrainedModule


class ReplayValidation:
    """Replays held-out samples whose completions the target wrote greedily. Each rank holds its own rows.

    Args:
        chunk_rows: of `greedy_hits`.
    """

    def __init__(
        self,
        source: HiddenStateSource,
        row_tokens: int,
        max_draft_tokens: int,
        chunk_rows: int,
        world: World,
    ) -> None:
        self.max_draft_tokens, self.chunk_rows = max_draft_tokens, chunk_rows
        self.device = world.device
        self.shows_progress = world.is_main
        lengths = np.asarray(source.lengths)
        rows = pack_epoch(lengths, row_tokens, seed=0, epoch=0)
        pin_memory = world.device.type == "cuda"
        self.batches: list[PackedBatch] = [
            pack_row(
                source.get_many(row), sum(int(source.lengths[one]) for one in row), pin_memory=pin_memory
            )
            for row in rows[world.rank :: world.size]
        ]

    @torch.no_grad()
    def run(self, module: TrainedModule) -> dict[int, AcceptanceStats]:
        """Return the statistics by draft length 1..max_draft_tokens over all ranks, which all call."""
        num = self.max_draft_tokens
        totals = torch.zeros(num, 1 + num, dtype=torch.float64)
        with module.gathered():
            for batch in tracked(self.batches, "validation", "rows", shown=self.shows_progress):
                for k, hits, supervised in module.hits(batch, num, self.chunk_rows):
                    stats = replay(hits, supervised, k)
                    totals[k - 1, 0] += stats.num_drafts
                    totals[k - 1, 1 : 1 + k] += torch.tensor(stats.accepted_per_position)
        counts = sum_over_ranks(totals.to(self.device)).long().tolist()
        return {
            k: AcceptanceStats(k, counts[k - 1][0], tuple(counts[k - 1][1 : 1 + k]))
            for k in range(1, num + 1)
        }


class DriftDiagnosis:
    """Measures drift on some rows of held-out samples, which are the same each time; on rank 0.

    Args:
        row_tokens: at most so many tokens of samples are used.
        max_steps: the speculation steps that are rolled out, if the completions are long enough.
    """

    def __init__(
        self,
        source: HiddenStateSource,
        row_tokens: int,
        max_steps: int,
        world: World,
    ) -> None:
        self.chosen = None
        if not world.is_main:
            return
        used: list[CapturedSample] = []
        num_tokens = 0
        for index, length in enumerate(source.lengths):
            if num_tokens + length > row_tokens:
                continue
            [sample] = source.get_many([index])
            if bool(sample.loss_mask.any()):
                used.append(sample)
                num_tokens += int(length)
        if used:
            batch = pack_row(used, num_tokens, pin_memory=world.device.type == "cuda")
            self.chosen = choose_rows(batch, max_steps)

    def run(self, module: TrainedModule) -> dict[str, Any] | None:
        """Return the numbers of a record; None on other ranks than 0, without supervised drafts or a chain.

        Every rank calls.
        """
        with module.gathered():
            drift = None if self.chosen is None else module.drift(self.chosen)
        return None if drift is None else drift.record()
