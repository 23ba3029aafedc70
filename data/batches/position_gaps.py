"""Gaps in the positions of training samples, so that the drafter meets distances that the samples lack."""

import hashlib
import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PositionGaps:
    """By chance, the positions of a sample jump once by a random number of tokens.

    What comes after the jump is then as far from what comes before it as in a longer context. Only distances
    matter: with RoPE attention is the same if all positions of a document are moved alike, so that an offset
    without a gap would train nothing.

    Source: arXiv 2309.10400 trains LLMs for longer contexts in this way.
    """

    probability: float
    max_tokens: int  # the longest jump
    seed: int

    def position_ids(self, length: int, step: int, sample: int) -> Tensor:
        """Return int64 [length], which begins at 0.

        Args:
            step: the optimizer step, so that a sample has other gaps in each epoch.
            sample: the index of the sample.
        """
        position_ids = torch.arange(length)
        digest = hashlib.sha256(f"{self.seed}:{step}:{sample}".encode()).digest()
        rng = random.Random(digest)
        if length > 1 and rng.random() < self.probability:
            position_ids[rng.randrange(1, length) :] += rng.randint(1, self.max_tokens)
        return position_ids
