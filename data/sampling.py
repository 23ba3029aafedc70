"""Prompts and the sampling settings with which the target answers them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Prompts = Sequence[Sequence[int]]


def mixed_seed(*numbers: int) -> int:
    """Return a seed that is made of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@dataclass(frozen=True)
class Sampling:
    """All settings for generating an answer; an engine takes none from the model's generation config.

    Args:
        stop_token_ids: the first of them ends an answer and is part of it.
        temperature: 0 is greedy decoding.
        top_k: 0 is no limit.
    """

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float
    seed: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def of_all_tokens(self) -> bool:
        """Whether the tokens' probabilities are the model's at the temperature."""
        return not self._limits

    @property
    def described(self) -> str:
        """The temperature, and what else changes the tokens' probabilities."""
        values = {"temperature": self.temperature, **self._limits}
        return ", ".join(f"{name}={value:g}" for name, value in values.items())

    @property
    def _limits(self) -> dict[str, float]:
        """The settings that are not their defaults."""
        names = ("top_k", "top_p", "min_p", "repetition_penalty")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(Sampling, name)}
