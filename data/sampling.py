"""Prompts and the sampling settings with which the target answers them."""

from collections.abc import Sequence
from dataclasses import dataclass

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Sampling:
    """The settings for generating an answer; the model's generation config is not used.

    Args:
        stop_token_ids: the first of them ends an answer and is part of it.
        temperature: 0 is greedy decoding.
    """

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float
    seed: int
