"""Prompts and the sampling settings with which the target answers them."""

from collections.abc import Sequence
from dataclasses import dataclass

Prompts = Sequence[Sequence[int]]


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
