"""Prompts of evaluation sets, and the training conversations that contain them."""

import hashlib
import unicodedata
from collections.abc import Iterable

from data.conversations.schemas import Conversation
from data.conversations.split import first_prompt


def normalized(text: str) -> str:
    """Return the text in Unicode's NFKC form, without case, and with single spaces for all white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


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
        if self._sets:
            for message in conversation.messages:
                if (
                    message["role"] == "user"
                    and (found := self._sets.get(_digest(message["content"]))) is not None
                ):
                    return found
        return -1


def _digest(text: str) -> bytes:
    return hashlib.blake2b(normalized(text).encode(errors="replace"), digest_size=16).digest()
