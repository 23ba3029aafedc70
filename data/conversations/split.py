"""The prompts of conversations, and the choice of some of them by their texts alone."""

import hashlib
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.conversations.schemas import Conversation


def choose_prompts(conversations: Sequence[Conversation], num_prompts: int, seed: int) -> list[Conversation]:
    """Choose at most `num_prompts` conversations with different prompts, by their texts and the seed only."""
    by_prompt = {first_prompt(c): c for c in reversed(conversations)}
    chosen = sorted(by_prompt, key=lambda prompt: prompt_rank(prompt, seed))[:num_prompts]
    return [by_prompt[prompt] for prompt in chosen]


def first_prompt(conversation: Conversation) -> str:
    """Return the text of the first user message."""
    return next(message["content"] for message in conversation.messages if message["role"] == "user")


def prompt_hashes(conversations: Sequence[Conversation]) -> NDArray[np.uint64]:
    """Return a hash of each conversation's prompt, whatever its white space. [C]"""
    return np.array([prompt_hash(first_prompt(one)) for one in conversations], dtype=np.uint64)


def prompt_hash(prompt: str) -> int:
    """Return a hash of 64 bits of a prompt, whatever its white space."""
    digest = hashlib.blake2b(" ".join(prompt.split()).encode(), digest_size=8).digest()
    return int.from_bytes(digest, sys.byteorder)


def prompt_rank(prompt: str, seed: int) -> bytes:
    """Return 32 bytes; the prompts with the lowest ones are chosen."""
    return hashlib.sha256(f"{seed}:{prompt}".encode()).digest()
