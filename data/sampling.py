"""How the target writes."""

from collections.abc import Sequence
from dataclasses import dataclass

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Sampling:
    """How an answer is written; nothing of the model's own generation settings is used.

    temperature: 0 is greedy, any other samples from the whole distribution.
    stop_token_ids: the first of them ends an answer, and belongs to it.
    """

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float
    seed: int
