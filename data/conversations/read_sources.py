"""Reading sources into a table, with what identifies the prompts of the conversations."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.conversations.overlap import EvaluationPrompts
from data.conversations.reading import ConversationReader
from data.conversations.split import first_prompt, prompt_hash, prompt_rank
from data.conversations.table import ConversationTable, ConversationWriter

RANK_BYTES = 16


@dataclass(frozen=True)
class ReadSources:
    """The conversations of all sources, one source after the other, C in all."""

    names: tuple[str, ...]
    table: ConversationTable
    starts: tuple[int, ...]  # of each source in the table, and the end
    ranks: NDArray[np.void]  # bytes [C], by which prompts are chosen; equal for equal prompts
    prompts: NDArray[np.uint64]  # hashes [C] of the prompts, whatever their white space
    overlaps: NDArray[np.int32]  # [C], the evaluation set that has a conversation's prompt, or -1

    def __len__(self) -> int:
        return len(self.table)

    @property
    def sources(self) -> NDArray[np.int32]:
        """The index of each conversation's source. [C]"""
        counts = [end - start for start, end in pairwise(self.starts)]
        return np.repeat(np.arange(len(self.names), dtype=np.int32), counts)


def read_sources(
    readers: Mapping[str, ConversationReader],
    path: Path,
    seed: int,
    evaluated: EvaluationPrompts | None = None,
) -> ReadSources:
    """Read all sources into a file of conversations, which are in memory one at a time.

    Raises:
        UserError: a source cannot be read.
    """
    ranks, prompts, overlaps, starts = bytearray(), array("Q"), array("i"), [0]
    with ConversationWriter(path) as writer:
        for reader in readers.values():
            for conversation in reader:
                writer.add(conversation)
                prompt = first_prompt(conversation)
                ranks += prompt_rank(prompt, seed)[:RANK_BYTES]
                prompts.append(prompt_hash(prompt))
                overlaps.append(-1 if evaluated is None else evaluated.find(conversation))
            starts.append(len(prompts))
    return ReadSources(
        tuple(readers),
        ConversationTable(path),
        tuple(starts),
        np.frombuffer(bytes(ranks), dtype=f"V{RANK_BYTES}"),
        np.asarray(prompts, dtype=np.uint64),
        np.asarray(overlaps, dtype=np.int32),
    )
