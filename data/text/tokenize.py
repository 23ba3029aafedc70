"""Conversations to an Arrow dataset of token ids and loss masks, in parallel and in order."""

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from data.progress import Progress
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer, tokenizer_fingerprint
from data.text import template
from data.text.sources import Conversation, first_reasons
from data.text.template import RenderedConversation, TemplateRefused, Turns, template_fingerprint
from eagle31.errors import UserError

_FORMAT = 1
_REPORT = "report.json"
_CHUNK_CONVERSATIONS = 64
_CHUNKS_PER_WORKER = 4
_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "num_prompt_tokens": pa.int64(),
    }
)
MAX_REFUSED_FRACTION = 0.01


class Overlong(Enum):
    """What becomes of a sample with more than `max_tokens` tokens."""

    drop = "drop"
    cut = "cut"  # at max_tokens


@dataclass(frozen=True)
class TokenizeReport:
    """What became of the conversations."""

    num_conversations: int
    num_refused: int  # conversations that the template does not take
    num_samples: int  # written
    num_tokens: int
    num_supervised_tokens: int  # the assistant's
    num_overlong: int  # samples cut or dropped for their length
    num_uncounted: int  # samples dropped because no row of them counts
    num_straddling: int  # tokens left out because they lie on both sides of a turn's edge
    template_fingerprint: str

    @staticmethod
    def load(directory: Path) -> "TokenizeReport":
        return TokenizeReport(**json.loads((directory / _REPORT).read_text()))


@dataclass(frozen=True)
class _Settings:
    tokenizer: PreTrainedTokenizerBase
    turns: Turns
    template_kwargs: Mapping[str, Any]
    eos_token_ids: Collection[int]
    max_tokens: int
    overlong: Overlong


@dataclass(frozen=True)
class _Chunk:
    """What comes back of a few conversations."""

    samples: pa.RecordBatch
    counts: Counter[str]
    refused: list[tuple[str, str]]  # (id, why)


_worker_settings: _Settings | None = None


def tokenize(
    conversations: Iterable[Conversation],
    tokenizer: str | Path | PreTrainedTokenizerBase,
    *,
    turns: Turns,
    template_kwargs: Mapping[str, Any],
    max_tokens: int,
    overlong: Overlong,
    num_workers: int,
    output_dir: Path,
    eos_token_ids: Collection[int] | None = None,
    max_refused_fraction: float = MAX_REFUSED_FRACTION,
    progress: bool = False,
    on_refused: Callable[[list[tuple[str, str]]], None] = lambda _: None,
) -> TokenizeReport:
    """Writes the samples to `output_dir` as a dataset for `datasets.load_from_disk`, with report.json in it.

    Columns: id (str), input_ids (int32 [N]), loss_mask (bool [N]) and num_prompt_tokens (int64, index of the
    first token of the assistant's). The order is that of the conversations, however many workers there are,
    and no more than a few chunks of them are in memory.

    Args:
        tokenizer: itself, its directory or its hub id.
        num_workers: processes; 1 is this one. Forked, so call it before any process group exists.
        output_dir: must not exist; appears when all of it is written.
        eos_token_ids: the tokens that end a turn; None takes the tokenizer's and the generation config's.
        max_refused_fraction: of the conversations, which the template may refuse.
        progress: reports progress on stderr.
        on_refused: is called once with (id, why) of the conversations that were refused, if there are any.

    Raises:
        UserError: the template cannot be used, refuses too many conversations, or no sample is left.
    """
    assert not output_dir.exists(), output_dir
    if isinstance(tokenizer, (str, Path)):
        tokenizer = load_tokenizer(TargetSpec(str(tokenizer)))
    eos_token_ids = template.eos_token_ids(tokenizer) if eos_token_ids is None else eos_token_ids
    settings = _Settings(tokenizer, turns, template_kwargs, frozenset(eos_token_ids), max_tokens, overlong)
    fingerprint = template_fingerprint(tokenizer, template_kwargs)
    counts: Counter[str] = Counter()
    refused: list[tuple[str, str]] = []
    with _renamed_when_done(output_dir) as directory:
        # In a directory of its own: `datasets` writes no dataset beside the file it reads.
        stream = directory / "stream" / "samples.arrow"
        stream.parent.mkdir()
        with (
            pa.OSFile(str(stream), "wb") as sink,
            pa.ipc.new_stream(sink, _SCHEMA) as writer,
            Progress("tokenize", None, "conversations", shown=progress) as bar,
        ):
            for chunk in _tokenized_chunks(conversations, settings, num_workers):
                writer.write_batch(chunk.samples)
                counts += chunk.counts
                refused += chunk.refused
                bar.update(chunk.counts["num_conversations"])
        report = _report(counts, len(refused), fingerprint)
        _check(report, refused, max_refused_fraction, max_tokens)
        if refused:
            on_refused(refused)
        with _datasets_bars(progress and sys.stderr.isatty()):
            datasets.Dataset.from_file(str(stream)).save_to_disk(str(directory))
        shutil.rmtree(stream.parent)
        (directory / _REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def tokenize_fingerprint(
    content_fingerprint: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    turns: Turns,
    template_kwargs: Mapping[str, Any],
    max_tokens: int,
    overlong: Overlong,
    eos_token_ids: Collection[int] | None = None,
) -> str:
    """sha256 of everything the written samples depend on; the number of workers is not part of it."""
    eos_token_ids = template.eos_token_ids(tokenizer) if eos_token_ids is None else eos_token_ids
    parts = {
        "format": _FORMAT,
        "content": content_fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer, template_kwargs),
        "turns": turns.value,
        "max_tokens": max_tokens,
        "overlong": overlong.value,
        "eos_token_ids": sorted(eos_token_ids),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _tokenized_chunks(
    conversations: Iterable[Conversation], settings: _Settings, num_workers: int
) -> Iterator[_Chunk]:
    """In order; at most a few chunks for each worker are under way."""
    iterator = iter(conversations)
    chunks = iter(lambda: list(islice(iterator, _CHUNK_CONVERSATIONS)), [])
    if num_workers <= 1:
        yield from (_tokenize_chunk(settings, chunk) for chunk in chunks)
        return
    # Forked workers inherit the tokenizer: nothing is imported or loaded again.
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_workers, fork, _start_worker, (settings,))
    pending: deque[Future[_Chunk]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_tokenize_in_worker, chunk))
            if len(pending) > _CHUNKS_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(settings: _Settings) -> None:
    global _worker_settings
    _worker_settings = settings
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _tokenize_in_worker(conversations: list[Conversation]) -> _Chunk:
    assert _worker_settings is not None
    return _tokenize_chunk(_worker_settings, conversations)


def _tokenize_chunk(settings: _Settings, conversations: list[Conversation]) -> _Chunk:
    counts = Counter(num_conversations=len(conversations))
    refused: list[tuple[str, str]] = []
    samples: list[tuple[str, RenderedConversation]] = []
    for conversation in conversations:
        try:
            rendered = template.render(
                settings.tokenizer,
                conversation,
                turns=settings.turns,
                template_kwargs=settings.template_kwargs,
                eos_token_ids=settings.eos_token_ids,
            )
        except TemplateRefused as error:
            refused.append((conversation.id, error.remedy))
            continue
        samples += [(conversation.id, sample) for sample in _kept(rendered, settings, counts)]
    for _, sample in samples:
        counts["num_tokens"] += len(sample.input_ids)
        counts["num_supervised_tokens"] += sum(sample.loss_mask)
    counts["num_samples"] = len(samples)
    return _Chunk(_record_batch(samples), counts, refused)


def _kept(
    rendered: list[RenderedConversation], settings: _Settings, counts: Counter[str]
) -> Iterator[RenderedConversation]:
    for sample in rendered:
        counts["num_straddling"] += sample.num_straddling
        if len(sample.input_ids) > settings.max_tokens:
            counts["num_overlong"] += 1
            if settings.overlong is Overlong.drop:
                continue
            sample = sample.cut(settings.max_tokens)
        if sample.has_counted_row:
            yield sample
        else:
            counts["num_uncounted"] += 1


def _record_batch(samples: list[tuple[str, RenderedConversation]]) -> pa.RecordBatch:
    columns = {
        "id": [id for id, _ in samples],
        "input_ids": [sample.input_ids for _, sample in samples],
        "loss_mask": [sample.loss_mask for _, sample in samples],
        "num_prompt_tokens": [sample.num_prompt_tokens for _, sample in samples],
    }
    return pa.RecordBatch.from_pydict(columns, schema=_SCHEMA)


def _report(counts: Counter[str], num_refused: int, fingerprint: str) -> TokenizeReport:
    return TokenizeReport(
        num_conversations=counts["num_conversations"],
        num_refused=num_refused,
        num_samples=counts["num_samples"],
        num_tokens=counts["num_tokens"],
        num_supervised_tokens=counts["num_supervised_tokens"],
        num_overlong=counts["num_overlong"],
        num_uncounted=counts["num_uncounted"],
        num_straddling=counts["num_straddling"],
        template_fingerprint=fingerprint,
    )


def _check(
    report: TokenizeReport, refused: list[tuple[str, str]], max_refused_fraction: float, max_tokens: int
) -> None:
    check_refused(refused, report.num_conversations, max_refused_fraction)
    if report.num_samples == 0:
        raise UserError(
            "data.max_tokens",
            max_tokens,
            f"No sample is left of {report.num_conversations} conversations: {report.num_overlong} are "
            f"longer, {report.num_uncounted} have no two tokens of the assistant's in a row. Raise it, or "
            "see the data with scripts/inspect_data.",
        )


def check_refused(
    refused: list[tuple[str, str]], num_conversations: int, max_fraction: float = MAX_REFUSED_FRACTION
) -> None:
    """Raises UserError when the template took too few; `refused` holds (id, why)."""
    if len(refused) > max_fraction * num_conversations:
        raise UserError(
            "target.chat_template",
            f"{len(refused)} of {num_conversations} conversations refused",
            f"More than {max_fraction:.1%} do not fit the target's template. The first ones:"
            f"{first_reasons(refused)}",
        )


@contextmanager
def _renamed_when_done(output_dir: Path) -> Iterator[Path]:
    """A directory beside `output_dir` that becomes it, or is removed."""
    directory = output_dir.with_name(f".{output_dir.name}.partial")
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was killed
    directory.mkdir(parents=True)
    try:
        yield directory
        directory.rename(output_dir)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _datasets_bars(shown: bool) -> Iterator[None]:
    were_disabled = datasets.utils.are_progress_bars_disabled()
    if not shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()
