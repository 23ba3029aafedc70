"""Conversations in an Arrow file, of which only a few are in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.conversations.schemas import Conversation, Conversations

# A conversation is read together with the others of its batch: few, because a random order reads one of them.
_BATCH_CONVERSATIONS = 16
_SCHEMA = pa.schema({"id": pa.string(), "messages": pa.string(), "tools": pa.string()})


class ConversationWriter:
    """Writes conversations to the file of a `ConversationTable`."""

    def __init__(self, path: Path) -> None:
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, _SCHEMA)
        self._rows: list[tuple[str, str, str | None]] = []

    def __enter__(self) -> "ConversationWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._write()
        self._writer.close()
        self._sink.close()

    def add(self, conversation: Conversation) -> None:
        tools = None if conversation.tools is None else json.dumps(conversation.tools, default=str)
        # `default`: Parquet has dates, which templates write as text.
        self._rows.append((conversation.id, json.dumps(conversation.messages, default=str), tools))
        if len(self._rows) == _BATCH_CONVERSATIONS:
            self._write()

    def _write(self) -> None:
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(column, pa.string()) for column in columns]
            self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))
            self._rows = []


class ConversationTable:
    """The conversations of a file that `ConversationWriter` has written.

    The file is read, not mapped, so that its size does not count as this process's memory. Forked processes
    can use the same table.
    """

    def __init__(self, path: Path) -> None:
        self._reader = pa.ipc.open_file(pa.OSFile(str(path)))
        self._batch: tuple[int, pa.RecordBatch] = (-1, None)
        num_batches = self._reader.num_record_batches
        self._length = 0
        if num_batches:
            last = self._reader.get_batch(num_batches - 1)
            self._length = (num_batches - 1) * _BATCH_CONVERSATIONS + last.num_rows

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < self._length:
            raise IndexError(index)
        number, row = divmod(index, _BATCH_CONVERSATIONS)
        if self._batch[0] != number:
            self._batch = number, self._reader.get_batch(number)
        id, messages, tools = (column[row].as_py() for column in self._batch[1].columns)
        return Conversation(
            id, tuple(json.loads(messages)), None if tools is None else tuple(json.loads(tools))
        )

    def __iter__(self) -> Iterator[Conversation]:
        return (self[index] for index in range(self._length))


class Selection:
    """Some of the conversations, in a given order."""

    def __init__(self, conversations: Conversations, indices: NDArray[np.int64]) -> None:
        self._conversations = conversations
        self._indices = indices  # [C]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Conversation:
        return self._conversations[int(self._indices[index])]

    def __iter__(self) -> Iterator[Conversation]:
        return (self[index] for index in range(len(self)))

    def shuffled(self, seed: int) -> "Selection":
        """Return the conversations in the random order in which a run with a limit uses them."""
        order = np.random.default_rng(seed).permutation(len(self))
        return Selection(self._conversations, self._indices[order])
