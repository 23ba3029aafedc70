"""Which conversations of a run's sources are trained on, and which are held out."""

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.conversations.files import unread_files
from data.conversations.held_out import (
    RANK,
    EvaluationPrompts,
    chosen_prompts,
    first_prompt,
    held_out_prompts,
    prompt_rank,
)
from data.conversations.near_duplicates import near_duplicates
from data.conversations.preformatted import SplitText, not_split
from data.conversations.reading import ConversationReader, Source, print_left_out
from data.conversations.schemas import Conversation, listed
from data.conversations.table import ConversationTable, Selection
from eagle31.errors import UserError
from eagle31.json_files import replacing

LEFT_OUT = "left_out.jsonl"
_TABLE, _EVAL_TABLE = "conversations.jsonl", "held_out.jsonl"
_TRAINING = "training.npy"  # indices of the table
_Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """How much of a source is used."""

    weight: float | None = None  # relative to the other sources' weights; None: all
    max_conversations: int | None = None


@dataclass(frozen=True)
class Mixture:
    """The sources of a run, and how conversations are chosen among theirs."""

    sources: Mapping[str, Source]
    num_held_out: int
    seed: int
    shares: Mapping[str, Share] = field(default_factory=dict)  # of the sources; none: all of each
    evaluation: Source | None = None  # None: prompts are held out of the sources
    evaluation_sets: Mapping[str, Source] = field(default_factory=dict)  # whose prompts are left out, too
    similarity: float | None = None  # the least of near-duplicates, which are left out
    with_answers: bool = True  # whether near-duplicates have similar answers, too
    split_text: SplitText = not_split  # makes messages of a text that a template has written


@dataclass(frozen=True)
class MixedConversations:
    """The conversations of a run; no prompt is in both."""

    training: Selection
    held_out: list[Conversation]
    summary: dict[str, Any]


@dataclass(frozen=True)
class _Read:
    """The conversations of all sources, one source after the other, C in all."""

    names: list[str]
    table: ConversationTable
    sources: NDArray[np.int32]  # [C], the index of a conversation's source
    ranks: NDArray[np.void]  # bytes [C], by which prompts are chosen; equal for equal prompts
    sets: NDArray[np.int32]  # [C], the evaluation set that has a conversation's prompt, or -1
    counts: Counter[str]  # of rows that are malformed or have images


def mix(mixture: Mixture, directory: Path, num_workers: int) -> MixedConversations:
    """Read all sources into files in `directory`, and choose the conversations for training and evaluation.

    Raises:
        UserError: a source cannot be read, or too few conversations are left.
    """
    evaluated, evaluation = EvaluationPrompts(), None
    if mixture.evaluation is not None:
        evaluation = _read(
            mixture, {"data.eval": mixture.evaluation}, directory / _EVAL_TABLE, EvaluationPrompts()
        )
        evaluated.add("data.eval", evaluation.table)
    for name, source in mixture.evaluation_sets.items():
        evaluated.add(name, source.reader(mixture.split_text))
    read = _read(mixture, mixture.sources, directory / _TABLE, evaluated)
    summary: dict[str, Any] = {
        "num_conversations_read": len(read.table),
        **read.counts,
    }
    duplicate_of = np.full(len(read.table), -1, dtype=np.int64)
    if mixture.similarity is not None:
        duplicate_of = near_duplicates(
            read.table,
            mixture.similarity,
            with_answers=mixture.with_answers,
            num_workers=num_workers,
            progress=True,
        )
        summary["num_near_duplicates"] = int(((read.sets < 0) & (duplicate_of >= 0)).sum())
        print(f"data: {summary['num_near_duplicates']:,} near-duplicates of earlier conversations left out")
    if evaluated.names:
        counts = Counter(read.sets[read.sets >= 0].tolist())
        found = {name: counts[index] for index, name in enumerate(evaluated.names)}
        summary["num_with_evaluation_prompts"] = found
        shown = ", ".join(f"{name} {count:,}" for name, count in found.items())
        print(f"data: conversations with a prompt of an evaluation set, left out: {shown or 'none'}")
    _write_left_out(directory / LEFT_OUT, read, duplicate_of, evaluated.names)
    kept = np.flatnonzero((read.sets < 0) & (duplicate_of < 0))
    if evaluation is None:
        training, held_out = _held_out(read, kept, mixture.num_held_out)
    else:
        chosen = chosen_prompts(evaluation.ranks, mixture.num_held_out)
        training, held_out = kept, [evaluation.table[int(i)] for i in chosen]
    if mixture.shares:
        training = training[chosen_mixture(read.sources[training], mixture.shares, mixture.seed)]
        used = np.bincount(read.sources[training], minlength=len(read.names)).tolist()
        summary["num_conversations_used"] = dict(zip(read.names, used, strict=True))
        print(f"data: conversations of each source: {summary['num_conversations_used']}", flush=True)
    if not len(training) or len(held_out) < 2:
        raise UserError(
            "data.train",
            ", ".join(source.location for source in mixture.sources.values()),
            f"Only {len(training)} training conversations and {len(held_out)} held-out prompts are left; "
            "give more data, or lower data.num_validation and data.num_test.",
        )
    with replacing(directory / _TRAINING) as sink:
        np.save(sink, training)
    return MixedConversations(Selection(read.table, training), held_out, summary)


def mixed_training(directory: Path) -> Selection:
    """Return the training conversations of `mix`, which another process has called."""
    return Selection(ConversationTable(directory / _TABLE, "rb"), np.load(directory / _TRAINING))


def remove_tables(directory: Path) -> None:
    """Remove the files of `mix`, whose conversations are then used."""
    for name in (_TABLE, _EVAL_TABLE, _TRAINING):
        (directory / name).unlink(missing_ok=True)


def _read(mixture: Mixture, sources: Mapping[str, Source], path: Path, evaluated: EvaluationPrompts) -> _Read:
    """Read all sources into a file of conversations, which are in memory one at a time."""
    ranks, sets, counts = bytearray(), [], Counter[str]()
    table, ends = ConversationTable(path), [0]
    for source in sources.values():
        reader = source.reader(mixture.split_text)
        for conversation in reader:
            table.add(conversation)
            ranks += prompt_rank(first_prompt(conversation), mixture.seed)
            sets.append(evaluated.find(conversation))
        ends.append(len(sets))
        counts["num_malformed"] += len(reader.malformed)
        counts["num_left_out"] += len(reader.left_out)
        counts["num_cut"] += reader.cut.total()
        _print_read(reader)
    table.flush()
    return _Read(
        list(sources),
        table,
        np.repeat(np.arange(len(sources), dtype=np.int32), np.diff(ends)),
        np.frombuffer(bytes(ranks), RANK),
        np.array(sets, dtype=np.int32),
        counts,
    )


def _print_read(reader: ConversationReader) -> None:
    """Print what became of a source's rows and columns."""
    source, location = reader.source, reader.source.location
    if unread := unread_files(location, source.field, source.subset):
        print(f"data: {location}: files of other kinds or in no split, not read: {listed(unread)}")
    if reader.used:
        read = f"read from {listed(reader.used)}; not used: {listed(reader.unused) or 'none'}"
        print(f"data: {location}: {read}")
    rows = f"of {reader.num_rows:,} rows of {location}"
    if reader.malformed:
        print_left_out(f"{rows} are malformed", reader.malformed)
    for what, count in reader.cut.items():
        print(f"data: {count:,} {rows} have {what}")
    if reader.left_out:
        print_left_out(f"{rows} have nothing that can be used", reader.left_out)


def _held_out(read: _Read, kept: _Indices, num_held_out: int) -> tuple[_Indices, list[Conversation]]:
    """Return the indices of the training conversations, without the prompts of the held-out ones."""
    chosen = kept[held_out_prompts(read.ranks[kept], num_held_out)]
    held_out, prompts = [read.table[int(i)] for i in chosen], EvaluationPrompts()
    prompts.add("held out", held_out)
    differs = np.array([prompts.find(one) < 0 for one in Selection(read.table, kept)], dtype=bool)
    return kept[differs], held_out


def _write_left_out(path: Path, read: _Read, duplicate_of: _Indices, set_names: Sequence[str]) -> None:
    """Write a line of JSON for each conversation that is left out: its id, its source and the reason."""
    left_out = np.flatnonzero((read.sets >= 0) | (duplicate_of >= 0)).tolist()
    if not left_out:
        return
    with path.open("w", encoding="utf-8") as stream:
        for index in left_out:
            line = {"id": read.table[index].id, "source": read.names[read.sources[index]]}
            if read.sets[index] >= 0:
                line["evaluation_set"] = set_names[read.sets[index]]
            else:
                line["near_duplicate_of"] = read.table[int(duplicate_of[index])].id
            stream.write(json.dumps(line) + "\n")


def chosen_mixture(sources: NDArray[np.int32], shares: Mapping[str, Share], seed: int) -> _Indices:
    """Return the conversations that training uses, in order.

    With weights it is the largest choice in which the sources' numbers of conversations have the proportions
    of the weights and no conversation is repeated. What is chosen of a source is random, and a larger choice
    contains a smaller one.

    Args:
        sources: the source of each conversation, an index into `shares`. [C]

    Raises:
        UserError: a source has no conversations left, or so few that another source has none.
    """
    chosen = []
    for index, (name, share) in enumerate(shares.items()):
        members = np.flatnonzero(sources == index)
        if share != Share():
            order = np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(len(members))
            members = members[order[: share.max_conversations]]
        chosen.append(members)
    if any(share.weight is None for share in shares.values()):
        return np.sort(np.concatenate(chosen))
    weights = np.array([share.weight for share in shares.values()])
    numbers = np.array([len(one) for one in chosen])
    # A product such as 0.3 * 10 / 0.3 may be just below the whole number.
    used = np.floor((numbers / weights).min() * weights + 1e-6).astype(np.int64)
    used = np.minimum(numbers, used)
    scarce = int((numbers / weights).argmin())
    for name, count in zip(shares, used, strict=True):
        if not count:
            remedy = (
                f"No conversation of {name} would be used, because {list(shares)[scarce]} has only "
                f"{numbers[scarce]:,}; give {name} a larger weight."
            )
            raise UserError(f"data.sources.{name}.weight", shares[name].weight, remedy)
    return np.sort(np.concatenate([one[:count] for one, count in zip(chosen, used, strict=True)]))
