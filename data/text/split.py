"""Held-out prompts that training never sees."""

import hashlib
from collections.abc import Sequence

from data.text.sources import Conversation
from eagle31.errors import UserError


def held_out_split(
    conversations: Sequence[Conversation], num_held_out: int, seed: int, *, field: str = "data.train"
) -> tuple[list[Conversation], list[Conversation]]:
    """Sets `num_held_out` prompts apart: (train, held_out), both in the order given.

    A prompt is the text of the first user message; whatever starts with the same one goes to the same side,
    so that held_out may have more conversations than prompts. Which prompts are taken depends on their text
    and the seed only, not on their order.

    Raises:
        UserError: nothing would be left to train on.
    """
    ranks = {prompt: _rank(prompt, seed) for prompt in {first_prompt(c) for c in conversations}}
    if len(ranks) <= num_held_out:
        remedy = f"{num_held_out} prompts are to be held out and there are {len(ranks)}; hold fewer out."
        raise UserError(field, f"{len(conversations)} conversations", remedy)
    chosen = set(sorted(ranks, key=ranks.__getitem__)[:num_held_out])
    train = [c for c in conversations if first_prompt(c) not in chosen]
    return train, [c for c in conversations if first_prompt(c) in chosen]


def choose_prompts(conversations: Sequence[Conversation], num_prompts: int, seed: int) -> list[Conversation]:
    """At most `num_prompts` conversations with different prompts; depends on their text and the seed only."""
    by_prompt = {first_prompt(c): c for c in reversed(conversations)}
    chosen = sorted(by_prompt, key=lambda prompt: _rank(prompt, seed))[:num_prompts]
    return [by_prompt[prompt] for prompt in chosen]


def drop_prompts(
    conversations: Sequence[Conversation], held_out: Sequence[Conversation]
) -> list[Conversation]:
    """The conversations whose prompt starts none of `held_out`."""
    prompts = {first_prompt(c) for c in held_out}
    return [c for c in conversations if first_prompt(c) not in prompts]


def first_prompt(conversation: Conversation) -> str:
    return next(message["content"] for message in conversation.messages if message["role"] == "user")


def _rank(prompt: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{prompt}".encode()).digest()
