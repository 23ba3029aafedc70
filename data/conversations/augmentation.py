"""Training conversations under other chat templates, each with a probability."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from data.conversations.schemas import Conversation, Conversations


@dataclass(frozen=True)
class AugmentedConversations:
    """The conversations in order, some of them with another template; which depends on id and seed.

    Args:
        templates: of `data.conversations.perturbation.TEMPLATES`, or paths of templates.
    """

    conversations: Conversations
    probability: float
    templates: Sequence[str]
    seed: int

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> Conversation:
        conversation = self.conversations[index]
        rng = random.Random(hashlib.sha256(f"{self.seed}:{conversation.id}".encode()).digest())
        chosen = rng.random() < self.probability
        return replace(conversation, template=rng.choice(self.templates)) if chosen else conversation

    def __iter__(self) -> Iterator[Conversation]:
        return (self[index] for index in range(len(self)))
