"""Training conversations under other chat templates, each with a probability."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from data.conversations.schemas import Conversation, Conversations


class AugmentedConversations:
    """The conversations in order, some of them with another template; which depends on id and seed.

    Args:
        templates: of `data.conversations.perturbation.TEMPLATES`, or paths of templates.
    """

    def __init__(
        self, conversations: Conversations, probability: float, templates: Sequence[str], seed: int
    ) -> None:
        self._conversations = conversations
        self._probability = probability
        self._templates = templates
        self._seed = seed

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Conversation:
        conversation = self._conversations[index]
        rng = random.Random(hashlib.sha256(f"{self._seed}:{conversation.id}".encode()).digest())
        chosen = rng.random() < self._probability
        return replace(conversation, template=rng.choice(self._templates)) if chosen else conversation

    def __iter__(self) -> Iterator[Conversation]:
        return (self[index] for index in range(len(self)))
