"""Conversations in a file, of which only one is in memory, and which of them are used with which template."""

import hashlib
import json
import os
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from data.conversations.schemas import Conversation, Conversations


class ConversationTable(Conversations):
    """Conversations that are written to a file as JSON lines, and read from it in any order.

    Forked processes can read the same table, once `flush` was called.
    """

    def __init__(self, path: Path, mode: str = "w+b") -> None:
        self._file: IO[bytes] = path.open(mode)
        self._starts = array("q", [0])  # of the lines, and the end of the file
        if mode == "rb":  # what another process has written
            self._starts.extend(accumulate(map(len, self._file)))

    def add(self, conversation: Conversation) -> None:
        # `default`: Parquet has dates, which templates write as text.
        line = json.dumps([conversation.id, conversation.messages, conversation.tools], default=str).encode()
        self._file.write(line + b"\n")
        self._starts.append(self._starts[-1] + len(line) + 1)

    def flush(self) -> None:
        """Have what was added in the file, also for other nodes."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Conversation:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, stop = self._starts[index : index + 2]
        id, messages, tools = json.loads(os.pread(self._file.fileno(), stop - start, start))
        return Conversation(id, tuple(messages), None if tools is None else tuple(tools))


class Selection(Conversations):
    """Some of the conversations, in a given order."""

    def __init__(self, conversations: Conversations, indices: NDArray[np.int64]) -> None:
        self._conversations = conversations
        self._indices = indices  # [C]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Conversation:  # type: ignore[override]
        return self._conversations[int(self._indices[index])]

    def shuffled(self, seed: int) -> "Selection":
        """Return the conversations in the random order in which a run with a limit uses them."""
        order = np.random.default_rng(seed).permutation(len(self))
        return Selection(self._conversations, self._indices[order])


@dataclass(frozen=True)
class AugmentedConversations(Conversations):
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

    def __getitem__(self, index: int) -> Conversation:  # type: ignore[override]
        conversation = self.conversations[index]
        rng = random.Random(hashlib.sha256(f"{self.seed}:{conversation.id}".encode()).digest())
        chosen = rng.random() < self.probability
        return replace(conversation, template=rng.choice(self.templates)) if chosen else conversation
