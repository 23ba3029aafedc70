"""Training conversations under other conditions, each chosen with a probability."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from transformers import PreTrainedTokenizerBase

from data.conversations.perturbation import UNCHANGED, with_documents, with_system
from data.conversations.schemas import Conversation, Conversations

MAX_DOCUMENTS = 1024


@dataclass(frozen=True)
class Augmentation:
    """The changes of training conversations; each is made independently of the others."""

    template_probability: float
    templates: Sequence[str]  # of `data.conversations.perturbation.TEMPLATES`
    system_probability: float
    systems: Sequence[str]  # of `data.conversations.perturbation.SYSTEM_PROMPTS`
    documents_probability: float
    documents_tokens: int  # the most tokens of documents before a question
    seed: int


class AugmentedConversations:
    """The conversations in order, some of them changed when they are read. The ids stay.

    What happens to a conversation depends on its id and the seed, and for documents on the first
    `MAX_DOCUMENTS` conversations, whose texts are the documents.
    """

    def __init__(
        self,
        conversations: Conversations,
        augmentation: Augmentation,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._conversations = conversations
        self._augmentation = augmentation
        self._tokenizer = tokenizer
        self._documents: list[str] = []
        if augmentation.documents_probability > 0:
            self._documents = [document_of(one) for one in islice(conversations, MAX_DOCUMENTS)]

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Conversation:
        return _changed(self._conversations[index], self._augmentation, self._documents, self._tokenizer)

    def __iter__(self) -> Iterator[Conversation]:
        return (self[index] for index in range(len(self)))


def document_of(conversation: Conversation) -> str:
    """Return the texts of the users and the assistant, without roles."""
    texts = [m["content"] for m in conversation.messages if m["role"] in ("user", "assistant")]
    return "\n\n".join(text for text in texts if text)


def _changed(
    conversation: Conversation,
    augmentation: Augmentation,
    documents: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> Conversation:
    digest = hashlib.sha256(f"{augmentation.seed}:{conversation.id}".encode()).digest()
    rng = random.Random(digest)
    # All numbers are drawn whatever the probabilities are, so that one change does not move another.
    template, system, lengthened = (rng.random() for _ in range(3))
    template_name, system_name = (
        rng.choice(names or [UNCHANGED]) for names in (augmentation.templates, augmentation.systems)
    )
    num_tokens = rng.randint(1, augmentation.documents_tokens)
    messages = conversation.messages
    if system < augmentation.system_probability:
        messages = tuple(with_system(messages, system_name))
    if lengthened < augmentation.documents_probability:
        messages = tuple(with_documents(messages, documents, num_tokens, tokenizer))
    name = template_name if template < augmentation.template_probability else UNCHANGED
    return replace(conversation, messages=messages, template=name)
