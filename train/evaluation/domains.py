"""The domains of the robustness matrix: where their prompts come from, and which of them are used."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.text.schemas import Conversation
from data.text.sources import read_conversations
from data.text.split import choose_prompts, prompt_hashes
from eagle31.errors import UserError


@dataclass(frozen=True)
class DomainSource:
    """All conversations of a domain, and the texts that can lengthen their prompts."""

    name: str
    num_prompts: int  # of each cell
    conversations: Sequence[Conversation]
    documents: Sequence[str]


@dataclass(frozen=True)
class Domain:
    """The chosen conversations of a domain: those of the evaluation, and others for validation."""

    name: str
    evaluation: Sequence[Conversation]
    validation: Sequence[Conversation]
    documents: Sequence[str]
    num_left_out: int = 0  # prompts that training has seen


def read_domains(
    name: str,
    source: str,
    *,
    split: str,
    subset: str | None,
    prompt_column: str | None,
    category_column: str | None,
    num_prompts: int,
    response_column: str | None = None,
    field: str,
) -> list[DomainSource]:
    """Read a source as one domain, or as one for each value of the category column.

    Raises:
        UserError: the source cannot be read, or two categories have the same name but for punctuation.
    """
    read = read_conversations(
        source,
        split=split,
        subset=subset,
        prompt_column=prompt_column,
        response_column=response_column,
        require_answer=False,
        category_column=category_column,
        field=field,
    )
    documents = [document_of(one) for one in read.conversations]
    if category_column is None:
        return [DomainSource(name, num_prompts, read.conversations, documents)]
    names: dict[str, str] = {}
    members: dict[str, list[Conversation]] = {}
    for conversation, category in zip(read.conversations, read.categories, strict=True):
        suffix = re.sub(r"[^\w-]+", "_", category)
        key = f"{name}.{suffix}"
        if names.setdefault(key, category) != category:
            remedy = f"The categories {names[key]!r} and {category!r} would both be called {key}; rename one."
            raise UserError(field, source, remedy)
        members.setdefault(key, []).append(conversation)
    return [DomainSource(key, num_prompts, found, documents) for key, found in members.items()]


def chosen_domain(source: DomainSource, seen: NDArray[np.uint64], seed: int) -> Domain:
    """Choose prompts by their texts and the seed. Those for validation are others than those of evaluation.

    Args:
        seen: hashes of the prompts that training has seen, which are left out.
    """
    is_new = ~np.isin(prompt_hashes(source.conversations), seen)
    new = [one for one, keep in zip(source.conversations, is_new, strict=True) if keep]
    ranked = choose_prompts(new, 2 * source.num_prompts, seed)
    num_left_out = len(source.conversations) - len(new)
    evaluation, validation = ranked[: source.num_prompts], ranked[source.num_prompts :]
    return Domain(source.name, evaluation, validation, source.documents, num_left_out)


def prompt_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the messages up to the turn that the target writes.

    That is the last assistant turn. Where users' turns follow each other, as in MT-Bench, whose second turn
    refers to an answer, it is the first one.
    """
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    for index in range(1, len(messages)):
        if messages[index - 1]["role"] == messages[index]["role"] == "user":
            return messages[:index]
    return messages


def document_of(conversation: Conversation) -> str:
    """Return the text of a conversation."""
    return "\n\n".join(message["content"] for message in conversation.messages if message["content"])
