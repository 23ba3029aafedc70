"""Samples in memory, which a loader reads as it reads a store."""

from collections.abc import Sequence

import torch

from data.samples import CapturedSample
from tests.eagle31.tiny import random_batch, tiny_config


class MemorySource:
    """A source of hidden states that has its samples in memory."""

    def __init__(self, samples: Sequence[CapturedSample]) -> None:
        self.samples = samples
        self.lengths = [len(sample.input_ids) for sample in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> CapturedSample:
        return self.samples[index]

    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]:
        return [self.samples[index] for index in indices]


def random_sample(length: int, seed: int, dtype: torch.dtype = torch.float64) -> CapturedSample:
    """Return a sample of random tokens and states."""
    row = random_batch((length,), tiny_config(), seed=seed, dtype=dtype)
    return CapturedSample(row.input_ids, row.loss_mask, row.aux_hidden_states, row.final_hidden_states)
