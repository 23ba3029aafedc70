"""Splitting held-out prompts from the training data."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.text.schemas import Conversation
from eagle31.errors import UserError


def held_out_split(
    conversations: Sequence[Conversation], num_held_out: int, seed: int, *, field: str = "data.train"
) -> tuple[list[Conversation], list[Conversation]]:
    """Hold out `num_held_out` prompts; return (train, held_out), both in the given order.

    A prompt is the text of the first user message. All conversations with the same prompt go to the same
    side, so held_out can have more conversations than prompts. The choice depends only on the texts of the
    prompts and the seed, not on their order.

    Raises:
        UserError: no training data would be left.
    """
    ranks = {prompt: _rank(prompt, seed) for prompt in {first_prompt(c) for c in conversations}}
    if len(ranks) <= num_held_out:
        remedy = f"There are {len(ranks)} different prompts and {num_held_out} to hold out; hold out fewer."
        raise UserError(field, f"{len(conversations)} conversations", remedy)
    chosen = set(sorted(ranks, key=ranks.__getitem__)[:num_held_out])
    train = [c for c in conversations if first_prompt(c) not in chosen]
    return train, [c for c in conversations if first_prompt(c) in chosen]


def choose_prompts(conversations: Sequence[Conversation], num_prompts: int, seed: int) -> list[Conversation]:
    """Choose at most `num_prompts` conversations with different prompts, by their texts and the seed only."""
    by_prompt = {first_prompt(c): c for c in reversed(conversations)}
    chosen = sorted(by_prompt, key=lambda prompt: _rank(prompt, seed))[:num_prompts]
    return [by_prompt[prompt] for prompt in chosen]


def drop_prompts(
    conversations: Sequence[Conversation], held_out: Sequence[Conversation]
) -> list[Conversation]:
    """Return the conversations whose prompts do not occur in `held_out`."""
    prompts = {first_prompt(c) for c in held_out}
    return [c for c in conversations if first_prompt(c) not in prompts]


def shuffled(conversations: Sequence[Conversation], seed: int) -> list[Conversation]:
    """Return the conversations in the random order in which a run with a limit uses them."""
    return [conversations[i] for i in np.random.default_rng(seed).permutation(len(conversations))]


def first_prompt(conversation: Conversation) -> str:
    """Return the text of the first user message."""
    return next(message["content"] for message in conversation.messages if message["role"] == "user")


def prompt_hashes(conversations: Sequence[Conversation]) -> NDArray[np.uint64]:
    """Return a hash of each conversation's prompt, whatever its white space. [C]"""
    texts = (" ".join(first_prompt(one).split()) for one in conversations)
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype=np.uint64)


def _rank(prompt: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{prompt}".encode()).digest()
