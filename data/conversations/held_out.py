"""The prompts of conversations: which are held out, and which training conversations contain them."""

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from data.conversations.schemas import Conversation
from eagle31.errors import UserError

RANK = np.dtype("V16")
_Indices = NDArray[np.int64]


def first_prompt(conversation: Conversation) -> str:
    """Return the text of the first user message."""
    return next(message["content"] for message in conversation.messages if message["role"] == "user")


def choose_prompts(conversations: Sequence[Conversation], num_prompts: int, seed: int) -> list[Conversation]:
    """Choose at most `num_prompts` conversations with different prompts, by their texts and the seed only."""
    ranks = b"".join(prompt_rank(first_prompt(one), seed) for one in conversations)
    return [conversations[i] for i in chosen_prompts(np.frombuffer(ranks, RANK), num_prompts)]


def prompt_rank(prompt: str, seed: int) -> bytes:
    """Return the bytes of a `RANK`; the prompts with the lowest ones are chosen."""
    return hashlib.sha256(f"{seed}:{prompt}".encode()).digest()[: RANK.itemsize]


def chosen_prompts(ranks: NDArray[np.void], num_prompts: int) -> _Indices:
    """Return the first conversation with each of the prompts of lowest rank, at most so many."""
    _, first = np.unique(ranks, return_index=True)  # sorted by rank
    return first[:num_prompts].astype(np.int64)


def held_out_prompts(ranks: NDArray[np.void], num_held_out: int) -> _Indices:
    """Return the first conversation with each of the prompts that are held out, by rank.

    The choice depends only on the texts of the prompts and the seed, not on their order.

    Raises:
        UserError: no training data would be left.
    """
    num_different = len(np.unique(ranks))
    if num_different <= num_held_out:
        remedy = (
            f"The training data have {num_different} different prompts; give more data, or lower "
            "data.num_validation and data.num_test."
        )
        raise UserError("data.num_validation + data.num_test", num_held_out, remedy)
    return chosen_prompts(ranks, num_held_out)


class EvaluationPrompts:
    """The prompts of some evaluation sets, as hashes of their normalized texts.

    A prompt is the first user message. One that several sets have counts for the first of them.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._sets: dict[bytes, int] = {}

    def add(self, name: str, conversations: Iterable[Conversation]) -> None:
        index = len(self.names)
        self.names.append(name)
        for conversation in conversations:
            self._sets.setdefault(_digest(first_prompt(conversation)), index)

    def find(self, conversation: Conversation) -> int:
        """Return the index of the set with a prompt that is one of the user's messages, or -1."""
        if not self._sets:
            return -1
        texts = (message["content"] for message in conversation.messages if message["role"] == "user")
        return next((self._sets[digest] for digest in map(_digest, texts) if digest in self._sets), -1)


def _digest(text: str) -> bytes:
    """Return a hash of the text in Unicode's NFKC form, without case, and with single spaces."""
    normalized = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.blake2b(normalized.encode(), digest_size=16).digest()
