"""Reading a run's sources, and which of their conversations are trained on and held out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.conversations.mixing import Share, chosen_mixture, chosen_prompts, held_out_split
from data.conversations.overlap import EvaluationPrompts
from data.conversations.read_sources import ReadSources, read_sources
from data.conversations.reading import ConversationReader, Source, first_reasons
from data.conversations.schemas import Conversation
from data.conversations.screening import Screening, screened, write_left_out
from data.conversations.table import Selection
from eagle31.errors import UserError
from train.config.run import RunConfig
from train.conversations.sources import (
    EVAL,
    Located,
    evaluation_sets,
    evaluation_source,
    training_sources,
)

LEFT_OUT = "left_out.jsonl"
_TABLE, _EVAL_TABLE = "conversations.arrow", "held_out.arrow"


@dataclass(frozen=True)
class ReadConversations:
    """The conversations of a run; no prompt is in both."""

    training: Selection
    held_out: list[Conversation]
    summary: dict[str, Any]


def read_conversations(
    config: RunConfig, located: Located, directory: Path, num_workers: int
) -> ReadConversations:
    """Read all sources into files in `directory`, and choose the conversations for training and evaluation.

    Raises:
        UserError: a source cannot be read, or too few conversations are left.
    """
    data, seed = config.data, config.seed
    evaluated = EvaluationPrompts()
    for name, source in evaluation_sets(config, located).items():
        evaluated.add(name, source.reader(data.max_malformed_fraction))
    sources = training_sources(data, located)
    read, summary = _read(sources, directory / _TABLE, config, evaluated)
    screening = screened(
        read, data.near_duplicates, with_answers=not data.regenerate.enabled, num_workers=num_workers
    )
    summary |= _report_screening(config, read, screening, evaluated.names)
    if len(screening.kept) < len(read):
        write_left_out(directory / LEFT_OUT, read, screening, evaluated.names)
    training, held_out, dropped = _held_out(config, located, directory, read, screening.kept)
    if data.sources:
        shares = {name: Share(one.weight, one.max_conversations) for name, one in data.sources.items()}
        training = training[chosen_mixture(read.sources[training], shares, seed)]
        counts = np.bincount(read.sources[training], minlength=len(read.names))
        summary["num_conversations_used"] = dict(zip(read.names, counts.tolist(), strict=True))
        _print_used(read, counts.tolist())
    if not len(training) or len(held_out) < 2:
        raise UserError(
            "data.train",
            data.train,
            f"Only {len(training)} training conversations and {len(held_out)} held-out prompts are left; "
            "give more data, or lower data.num_validation and data.num_test.",
        )
    selection = Selection(read.table, training)
    return ReadConversations(selection, held_out, summary | dropped)


def remove_tables(directory: Path) -> None:
    """Remove the files of `read_conversations`, whose conversations are then used."""
    for name in (_TABLE, _EVAL_TABLE):
        (directory / name).unlink(missing_ok=True)


def _read(
    sources: Mapping[str, Source], path: Path, config: RunConfig, evaluated: EvaluationPrompts | None = None
) -> tuple[ReadSources, dict[str, Any]]:
    readers = {name: one.reader(config.data.max_malformed_fraction) for name, one in sources.items()}
    read = read_sources(readers, path, config.seed, evaluated)
    for reader in readers.values():
        _print_malformed(reader)
    return read, {
        "num_conversations_read": len(read),
        "num_malformed": sum(len(reader.malformed) for reader in readers.values()),
    }


def _held_out(
    config: RunConfig, located: Located, directory: Path, read: ReadSources, kept: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[Conversation], dict[str, int]]:
    """Return the indices of the training conversations, the held-out ones, and a count."""
    data = config.data
    num_held_out = data.num_validation + data.num_test
    source = evaluation_source(data, located)
    if source is not None:
        evaluation, _ = _read({EVAL: source}, directory / _EVAL_TABLE, config)
        training = kept[~np.isin(read.ranks[kept], evaluation.ranks)]
        held_out = [evaluation.table[int(i)] for i in chosen_prompts(evaluation.ranks, num_held_out)]
        return training, held_out, {"num_dropped_as_held_out": len(kept) - len(training)}
    first, second = held_out_split(read.ranks[kept], num_held_out)
    training, held_out = kept[first], [read.table[int(i)] for i in kept[second]]
    if not data.drop_evaluation_prompts:
        return training, held_out, {}
    prompts = EvaluationPrompts()
    prompts.add("held out", held_out)
    differs = np.array([prompts.find(one) < 0 for one in Selection(read.table, training)], dtype=bool)
    return training[differs], held_out, {"num_dropped_as_held_out": int((~differs).sum())}


def _report_screening(
    config: RunConfig, read: ReadSources, screening: Screening, set_names: list[str]
) -> dict[str, Any]:
    """Print what is left out, and return the counts; none for what is off."""
    counts: dict[str, Any] = {}
    if config.data.drop_evaluation_prompts:
        counts["num_with_evaluation_prompts"] = screening.num_overlapping(set_names)
        shown = ", ".join(
            f"{name} {count:,}" for name, count in counts["num_with_evaluation_prompts"].items()
        )
        total = sum(counts["num_with_evaluation_prompts"].values())
        if shown:
            print(f"data: {total:,} conversations have a prompt of an evaluation set: {shown}; left out")
    if config.data.near_duplicates is not None:
        counts["num_near_duplicates"] = screening.num_near_duplicates
        what = f"of {len(read):,} conversations are near-duplicates of earlier ones and left out"
        print(f"data: {screening.num_near_duplicates:,} {what}")
    return counts


def _print_used(read: ReadSources, counts: Sequence[int]) -> None:
    starts = zip(read.names, counts, read.starts, read.starts[1:], strict=False)
    shown = ", ".join(f"{name} {used:,} of {end - start:,}" for name, used, start, end in starts)
    print(f"data: conversations of each source: {shown}", flush=True)


def _print_malformed(reader: ConversationReader) -> None:
    if reader.malformed:
        what = f"of {reader.num_rows:,} rows of {reader.source} are malformed"
        print_left_out(what, reader.malformed)


def print_left_out(what: str, left_out: Sequence[tuple[str, str]]) -> None:
    """Print the number of things that are left out and the first reasons."""
    print(f"data: {len(left_out):,} {what} and left out:{first_reasons(left_out)}", flush=True)
