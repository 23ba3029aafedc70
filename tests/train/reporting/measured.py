"""Acceptance that the real writer summarized, of made-up drafts."""

import random
from typing import Any

from eagle31.decoding.acceptance import AcceptanceStats
from train.evaluation.replay import PromptAcceptance

MAX_K = 8


def acceptance(
    rate: float, *, num_prompts: int = 24, drafts_per_prompt: int = 40, seed: int = 0, prompts: str = "same"
) -> dict[str, Any]:
    """Return `trained` of an evaluation whose draft tokens are accepted with a probability.

    Drafts of one seed meet the same luck at every rate, as drafts of the same text do.
    """
    by_prompt = []
    for prompt in range(num_prompts):
        luck = random.Random(f"{seed} {prompt}")
        hardness = luck.uniform(0.85, 1.0)
        draws = [[luck.random() for _ in range(MAX_K)] for _ in range(drafts_per_prompt)]
        hits = [next((i for i, one in enumerate(row) if one > rate * hardness), MAX_K) for row in draws]
        by_prompt.append(
            tuple(AcceptanceStats.from_lengths(k, [min(hit, k) for hit in hits]) for k in range(1, MAX_K + 1))
        )
    return PromptAcceptance(tuple(by_prompt), prompts_hash=prompts).to_json()
