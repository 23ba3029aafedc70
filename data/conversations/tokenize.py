"""Tokenizing conversations into an Arrow dataset of token ids and loss masks, in parallel and in order."""

import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from data.conversations.choices import Turns
from data.conversations.masks import RenderedConversation, render
from data.conversations.reading import first_reasons, print_left_out
from data.conversations.schemas import Conversation, Conversations
from data.conversations.template import TemplateRefused, has_markers, name_of, template_fingerprint
from data.conversations.token_bytes import token_ends
from data.conversations.workers import map_in_order
from data.progress import Progress
from data.refusals import num_allowed
from data.target.tokenizer import check_ids
from eagle31.errors import UserError
from eagle31.json_files import read_json, replacing, write_json

_CHUNK_CONVERSATIONS = 64
BLOCK_CONVERSATIONS = 1 << 14  # whose samples are kept if the run is killed
_MOST_CUT_AWAY = 0.1  # of the samples, before a run says so
SAMPLE_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "num_prompt_tokens": pa.int64(),
    }
)


@dataclass(frozen=True)
class Enough:
    """When to stop: after so many conversations and so many samples, both."""

    num_conversations: int
    num_samples: int

    def reached(self, counts: Mapping[str, int]) -> bool:
        return (
            counts["num_conversations"] >= self.num_conversations
            and counts["num_samples"] >= self.num_samples
        )


@dataclass(frozen=True)
class TokenizeReport:
    """Counts of what became of the conversations that were tokenized."""

    num_conversations: int
    num_refused: int  # conversations that the template refuses
    num_samples: int
    num_tokens: int
    num_supervised_tokens: int  # the assistant's
    num_overlong: int  # samples that were cut
    num_unsupervised: int  # samples dropped because they have no supervised position
    num_straddling: int  # tokens that are masked because they cross the boundary of a turn
    num_with_markers: int  # conversations with special tokens in another text than the assistant's
    notes: dict[str, int]  # how often the chat template does what, such as masks.LOST_REASONING
    template_fingerprint: str


@dataclass(frozen=True)
class _Chunk:
    """The result for a few conversations."""

    samples: pa.RecordBatch
    counts: Counter[str]
    notes: Counter[str]
    cut_away: Counter[int]  # samples that lose all answers, by the length that would keep one
    refused: list[tuple[str, str]]  # (id, reason)


def tokenize(
    conversations: Conversations,
    tokenizer: PreTrainedTokenizerBase,
    *,
    turns: Turns,
    template_kwargs: Mapping[str, Any],
    max_tokens: int,
    num_workers: int,
    output_dir: Path,
    eos_token_ids: Collection[int],
    vocab_size: int | None = None,
    enough: Enough | None = None,
    progress: bool = False,
) -> TokenizeReport:
    """Write the samples as a dataset for `datasets.load_from_disk`.

    The columns are id (str), input_ids (int32 [N]), loss_mask (bool [N]) and num_prompt_tokens (int64, the
    index of the assistant's first token). The order is that of the conversations for any number of workers,
    which read the conversations, and only a few chunks are in memory at a time.

    Args:
        num_workers: the number of processes; 1 uses only this process. Workers are forked, so no process
            group may exist yet.
        output_dir: it is replaced when everything is complete. A directory next to it has the blocks that
            a killed run has finished, from which the same conversations and settings resume.
        eos_token_ids: the tokens that end a turn.
        vocab_size: that of the target, which has every token of the data; None: any token is right.
        enough: leaves out the conversations that follow, the same ones for any number of workers.
        progress: reports progress on stderr.

    Raises:
        UserError: the template cannot be used or refuses too many conversations, the target lacks a token, or
            no sample is left.
    """
    fingerprint = template_fingerprint(tokenizer, template_kwargs)
    counts, notes, cut_away = Counter[str](), Counter[str](), Counter[int]()
    refused: list[tuple[str, str]] = []
    token_ends(tokenizer, "", [])  # builds its table, which the workers then share
    samples_of = partial(
        render,
        tokenizer,
        turns=turns,
        template_kwargs=template_kwargs,
        eos_token_ids=frozenset(eos_token_ids),
    )
    tokenize_chunk = partial(_tokenize_chunk, conversations, samples_of, tokenizer, max_tokens, vocab_size)
    parts = output_dir.with_name(f"{output_dir.name}-parts")
    parts.mkdir(parents=True, exist_ok=True)
    done = len([*parts.glob("*.arrow")])
    if done:
        state = read_json(parts / f"{done - 1:05}.json")
        counts, notes = Counter(state["counts"]), Counter(state["notes"])
        cut_away = Counter({int(length): count for length, count in state["cut_away"].items()})
        refused = [(id, reason) for id, reason in state["refused"]]
    starts = range(done * BLOCK_CONVERSATIONS, len(conversations), BLOCK_CONVERSATIONS)
    remaining = _chunks(starts.start, len(conversations))
    with (
        Progress("tokenize", None, "conversations", shown=progress) as bar,
        closing(map_in_order(tokenize_chunk, remaining, num_workers)) as chunks,
    ):
        bar.skip(counts["num_conversations"])
        for number, _ in enumerate(starts, start=done):
            if enough is not None and enough.reached(counts):
                break
            part = parts / f"{number:05}.arrow"
            with replacing(part) as sink, pa.ipc.new_stream(sink, SAMPLE_SCHEMA) as writer:
                for chunk in islice(chunks, BLOCK_CONVERSATIONS // _CHUNK_CONVERSATIONS):
                    writer.write_batch(chunk.samples)
                    counts += chunk.counts
                    notes += chunk.notes
                    cut_away += chunk.cut_away
                    refused += chunk.refused
                    check_refused(refused, len(conversations))
                    bar.update(chunk.counts["num_conversations"])
                    if enough is not None and enough.reached(counts):
                        break
                state = {"counts": counts, "notes": notes, "cut_away": cut_away, "refused": refused}
                write_json(part.with_suffix(".json"), state)  # those of the parts before it, too
    counts["num_refused"] = len(refused)
    names = {field.name for field in fields(TokenizeReport)} - {"notes", "template_fingerprint"}
    report = TokenizeReport(
        **{name: counts[name] for name in names}, notes=dict(notes), template_fingerprint=fingerprint
    )
    _check(report, refused, cut_away, max_tokens, tokenizer)
    for note, count in notes.items():
        print(f"data: {count:,} {note}", file=sys.stderr, flush=True)
    print_refused(refused)
    print_markers(report.num_with_markers)
    found = [datasets.Dataset.from_file(str(part)) for part in sorted(parts.glob("*.arrow"))]
    save_dataset(datasets.concatenate_datasets(found), output_dir)
    shutil.rmtree(parts)
    return report


def _chunks(first: int, num_conversations: int) -> Iterator[range]:
    for start in range(first, num_conversations, _CHUNK_CONVERSATIONS):
        yield range(start, min(start + _CHUNK_CONVERSATIONS, num_conversations))


def _tokenize_chunk(
    conversations: Conversations,
    samples_of: Callable[[Conversation], list[RenderedConversation]],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    vocab_size: int | None,
    indices: range,
) -> _Chunk:
    counts = Counter(num_conversations=len(indices))
    notes, cut_away = Counter[str](), Counter[int]()
    refused: list[tuple[str, str]] = []
    samples: list[tuple[str, RenderedConversation]] = []
    for conversation in map(conversations.__getitem__, indices):
        counts["num_with_markers"] += has_markers(tokenizer, conversation.messages)
        try:
            rendered = samples_of(conversation)
        except TemplateRefused as error:
            refused.append((conversation.id, error.remedy))
            continue
        for sample in rendered:
            notes += sample.notes
        samples += [(conversation.id, sample) for sample in _kept(rendered, max_tokens, counts, cut_away)]
    for _, sample in samples:
        if vocab_size is not None:
            check_ids(tokenizer, sample.input_ids, vocab_size)
        counts["num_tokens"] += len(sample.input_ids)
        counts["num_supervised_tokens"] += sum(sample.loss_mask)
    counts["num_samples"] = len(samples)
    return _Chunk(record_batch(samples), counts, notes, cut_away, refused)


def _kept(
    rendered: list[RenderedConversation], max_tokens: int, counts: Counter[str], cut_away: Counter[int]
) -> Iterator[RenderedConversation]:
    for sample in rendered:
        counts["num_straddling"] += sample.num_straddling
        counts["num_overlong"] += len(sample.input_ids) > max_tokens
        min_tokens = sample.min_tokens
        if min_tokens is not None and min_tokens <= max_tokens:
            yield sample.cut(max_tokens)
            continue
        counts["num_unsupervised"] += 1
        if min_tokens is not None:
            cut_away[min_tokens] += 1


def record_batch(samples: Sequence[tuple[str, RenderedConversation]]) -> pa.RecordBatch:
    """Return samples by their ids as rows of tokenized data."""
    columns = {
        "id": [id for id, _ in samples],
        "input_ids": [sample.input_ids for _, sample in samples],
        "loss_mask": [sample.loss_mask for _, sample in samples],
        "num_prompt_tokens": [sample.num_prompt_tokens for _, sample in samples],
    }
    return pa.RecordBatch.from_pydict(columns, schema=SAMPLE_SCHEMA)


def _check(
    report: TokenizeReport,
    refused: list[tuple[str, str]],
    cut_away: Counter[int],
    max_tokens: int,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    check_refused(refused, report.num_conversations)
    num_cut_away = cut_away.total()
    num_samples = report.num_samples + num_cut_away
    if not num_samples:
        remedy = (
            f"No sample is left of {report.num_conversations} conversations: none has two assistant tokens "
            "in a row. Look at one with scripts/inspect_data: does the template write the answers?"
        )
        raise UserError("target.chat_template", name_of(tokenizer), remedy)
    if num_cut_away <= num_samples * _MOST_CUT_AWAY:
        return
    num_missing = math.ceil(num_samples * (1 - _MOST_CUT_AWAY)) - report.num_samples
    enough = sorted(cut_away.elements())[num_missing - 1]
    what = f"{num_cut_away:,} of {num_samples:,} samples are cut before the second token of an answer"
    remedy = f"data.max_tokens={enough} keeps nine tenths of them"
    if not report.num_samples:
        raise UserError("data.max_tokens", max_tokens, f"No sample is left: {what}; {remedy}.")
    print(f"data: with data.max_tokens={max_tokens}, {what}; {remedy}", file=sys.stderr, flush=True)


def print_markers(num_conversations: int) -> None:
    """Say how many conversations have special tokens in their text, if any."""
    if num_conversations:
        what = (
            "conversations have special tokens in the text of a user, a tool or the system, which the target"
        )
        print(f"data: {num_conversations:,} {what} reads as its template's", file=sys.stderr, flush=True)


def print_refused(refused: Sequence[tuple[str, str]]) -> None:
    """Say which conversations the template refused, as (id, reason) pairs, if any."""
    if refused:
        print_left_out("conversations are rejected by the chat template", refused)


def check_refused(refused: list[tuple[str, str]], num_conversations: int) -> None:
    """Raise UserError if the template refused too many conversations; `refused` has (id, reason) pairs."""
    if len(refused) > num_allowed(num_conversations):
        raise UserError(
            "target.chat_template",
            f"{len(refused)} of {num_conversations} conversations refused",
            f"These are too many. {refused[0][1]} The first ones:{first_reasons(refused)}",
        )


def save_dataset(dataset: datasets.Dataset, directory: Path) -> None:
    """Save the dataset to a temporary directory, which then replaces `directory`."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    dataset.save_to_disk(str(partial))
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(partial, directory)
