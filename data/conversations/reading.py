"""Reading conversations from files, saved data sets and the Hub."""

import csv
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import fsspec
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from data.conversations.schemas import (
    NO_ANSWER,
    REGENERATE,
    Columns,
    Conversation,
    MalformedRow,
    Schema,
    before_images,
    find_schema,
    to_conversation,
)
from data.file_hashes import hash_files
from data.hub import check_hub
from eagle31.errors import UserError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LINES = ".txt"
_SUFFIXES = (".jsonl", ".json", ".ndjson", *_DELIMITERS, _LINES, ".parquet")
_COMPRESSIONS = (".gz", ".bz2", ".xz")
_MAX_FIELD_CHARACTERS = 1 << 27  # of a CSV file; the default is 128 KiB, which a long answer exceeds
_NUM_SHOWN, _SHOWN_CHARACTERS = 5, 300
MAX_MALFORMED_FRACTION = 0.01  # of the rows: few enough that what is left out does not matter


@dataclass(frozen=True)
class Source:
    """Where conversations come from, and which columns they have.

    The schema is determined from the first row: `messages` (OpenAI), `conversations` (ShareGPT), or a prompt
    and a response column (prompt/response, instruction/output, question/answer, or the two given names).
    Without answers it is the prompt column alone, or `turns`.

    Args:
        location: a .jsonl, .json, .csv, .tsv, .txt (a prompt per line) or .parquet file, the text ones also
            compressed (.gz, .bz2, .xz), a directory written by `datasets.save_to_disk`, or a hub id.
        field: the recipe's name for `location`, for error messages.
        split: the split of a hub data set or a saved DatasetDict; files have none.
        subset: the subset of a hub data set that has several.
        prompt_column: the column of the user's text; None: it is found by name.
        response_column: the column of the assistant's text; None: it is found by name.
        require_answer: if false, prompts without an answer are read too.
    """

    location: str
    field: str = "data.train"
    split: str = "train"
    subset: str | None = None
    prompt_column: str | None = None
    response_column: str | None = None
    require_answer: bool = True

    def reader(self, max_malformed_fraction: float = MAX_MALFORMED_FRACTION) -> "ConversationReader":
        """Return an iterator over the conversations; see `ConversationReader`."""
        return ConversationReader(self, max_malformed_fraction)

    def fingerprint(self) -> str:
        """Return what identifies the content: a hash of the files.

        For a hub id it is the fingerprint that `datasets` derives from the commit.
        """
        path = Path(self.location).expanduser()
        if is_file(self.location, self.field):
            return hash_files([path])[0]
        dataset = _load(self)
        if not path.is_dir():
            return dataset._fingerprint
        # The fingerprint of a saved data set stays when its files are changed.
        files = [Path(file["filename"]) for file in dataset.cache_files]
        hashes = hash_files(files)
        return hashlib.sha256(json.dumps([dataset.column_names, hashes]).encode()).hexdigest()

    @property
    def columns(self) -> list[str | None]:
        """What identifies the chosen columns."""
        return [self.prompt_column, self.response_column]


class ConversationReader:
    """Iterates over the conversations of a source in order, of which only a few are in memory.

    Malformed rows are left out; `malformed` has them as (location, reason), located as `file.jsonl:12` or
    `file.parquet[11]`. A conversation with images ends before the first one; `image_prompts` has those of
    which no answer is left.

    Args:
        max_malformed_fraction: the fraction of the rows that may be malformed.
    """

    def __init__(self, source: Source, max_malformed_fraction: float) -> None:
        self.source = source
        self.num_conversations = 0
        self.num_with_images = 0
        self.malformed: list[tuple[str, str]] = []
        self.image_prompts: list[tuple[str, str]] = []
        self._max_malformed_fraction = max_malformed_fraction

    @property
    def num_rows(self) -> int:
        return self.num_conversations + len(self.malformed) + len(self.image_prompts)

    def __iter__(self) -> Iterator[Conversation]:
        """Yield the conversations.

        Raises:
            UserError: the source does not exist, has no known schema, or, at its end, no conversation or too
                many malformed rows.
        """
        self.num_conversations = self.num_with_images = 0
        self.malformed, self.image_prompts = [], []
        source = self.source
        columns = Columns(source.prompt_column, source.response_column)
        schema: Schema | None = None
        for where, row in _rows(source):
            has_images = False
            try:
                if isinstance(row, MalformedRow):
                    raise row
                if not isinstance(row, dict):
                    raise MalformedRow(f"the row is a {type(row).__name__}, not an object")
                if schema is None:
                    schema = find_schema(row, source.location, columns, source.require_answer, source.field)
                messages = schema(row)
                text_only = before_images(messages)
                has_images = len(text_only) < len(messages)
                self.num_with_images += has_images
                conversation = to_conversation(row, text_only, source.require_answer)
            except MalformedRow as reason:
                left_out = self.image_prompts if has_images else self.malformed
                left_out.append((where, f"before its first image, {reason}" if has_images else str(reason)))
                continue
            self.num_conversations += 1
            yield conversation
        self._check()

    def _check(self) -> None:
        num_rows, num_malformed = self.num_rows, len(self.malformed)
        if num_rows == 0:
            remedy = "It has no rows; give a source with conversations."
            raise UserError(self.source.field, self.source.location, remedy)
        if not self.num_conversations or num_malformed > self._max_malformed_fraction * num_rows:
            remedy = f"{num_malformed} of {num_rows} rows are malformed"
            if self.image_prompts:
                remedy += f", and {len(self.image_prompts)} have an image before their first answer"
            if self.num_conversations:
                remedy += f", more than {self._max_malformed_fraction:.0%}"
            left_out = self.malformed or self.image_prompts
            lacks_answers = any(reason.endswith(NO_ANSWER) for _, reason in left_out)
            remedy += f". Correct them{f', or {REGENERATE}' if lacks_answers else ''}. The first reasons:"
            raise UserError(self.source.field, self.source.location, remedy + first_reasons(left_out))


def first_reasons(left_out: Sequence[tuple[str, str]]) -> str:
    """Format the first few (location, reason) pairs, each on a new line; long reasons are cut."""
    shown = "".join(f"\n  {where}: {reason[:_SHOWN_CHARACTERS]}" for where, reason in left_out[:_NUM_SHOWN])
    return shown + ("\n  ..." if len(left_out) > _NUM_SHOWN else "")


def is_file(location: str, field: str) -> bool:
    """Return whether the location is a file, and otherwise a directory or a hub id.

    Raises:
        UserError: it is none of them, or a file of another kind.
    """
    path = Path(location).expanduser()
    if path.is_dir():
        return False
    named_as_file = _suffix(path) in _SUFFIXES
    if path.exists() and not (named_as_file and path.is_file()):
        kinds = ", ".join(_SUFFIXES)
        raise UserError(field, location, f"Only files that end in {kinds} can be read.")
    if not path.exists() and (named_as_file or not re.fullmatch(r"[\w.-]+/[\w.-]+", location)):
        remedy = "There is no such file or directory; give a path, or a hub id such as org/name."
        raise UserError(field, location, remedy)
    return path.exists()


def _suffix(path: Path) -> str:
    """Return what the file's name ends in, without that of a compression."""
    return path.with_suffix("").suffix if path.suffix in _COMPRESSIONS else path.suffix


def _load(source: Source) -> Dataset:
    """Return a data set that `datasets` has saved, or one of the Hub.

    Raises:
        UserError: it cannot be loaded, or has no such split.
    """
    path, split = Path(source.location).expanduser(), source.split
    try:
        if not path.is_dir():
            check_hub(source.field, source.location, "dataset")
            return load_dataset(source.location, source.subset, split=split)
        loaded = load_from_disk(str(path))
        found = loaded[split] if isinstance(loaded, DatasetDict) else loaded
        found.data.table.validate(full=True)  # lists with wrong offsets would be read beyond their ends
        return found
    except UserError:
        raise
    except Exception as error:  # `datasets` believes what the files say, and raises whatever comes of it
        reason = f"`datasets` cannot load it (split {split}): {_one_line(error)}"
        raise UserError(source.field, source.location, reason) from error


def _rows(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) in order; a row that cannot be parsed is a `MalformedRow`.

    Raises:
        UserError: the source does not exist or cannot be read.
    """
    path = Path(source.location).expanduser()
    try:
        if is_file(source.location, source.field) and _suffix(path) != ".parquet":
            # A byte that is not UTF-8 becomes a character that no text may have, in its row alone.
            options = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
            with fsspec.open(str(path), "rt", compression="infer", **options) as stream:
                suffix = _suffix(path)
                if suffix == _LINES:
                    lines = ((number, line.strip()) for number, line in enumerate(stream, start=1))
                    yield from ((f"{path}:{number}", {"prompt": line}) for number, line in lines if line)
                elif suffix in _DELIMITERS:
                    yield from _csv_rows(path, stream, _DELIMITERS[suffix])
                else:
                    yield from _json_rows(path, stream)
            return
        if path.is_file():
            found: Any = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        else:
            found = _load(source)
        for index, row in enumerate(found):
            yield f"{source.location}[{index}]", _without_nulls(row, column=True)
    except UserError:
        raise
    except Exception as error:  # a decompressor, a parser and Arrow each have their own
        raise UserError(source.field, source.location, f"It cannot be read: {_one_line(error)}") from error


def _json_rows(path: Path, stream: TextIO) -> Iterator[tuple[str, Any]]:
    """Yield the rows of JSON lines, or those of one array."""
    started = False
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        if not started and line.lstrip().startswith("["):
            for index, row in enumerate(json.loads(line + stream.read())):
                yield f"{path}[{index}]", row
            return
        started = True
        try:
            yield f"{path}:{number}", json.loads(line)
        except (ValueError, RecursionError) as error:  # of numbers and nested brackets too
            yield f"{path}:{number}", MalformedRow(f"the line is not JSON ({error})")


def _csv_rows(path: Path, stream: TextIO, delimiter: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file whose first line names the columns; an empty field is None."""
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    reader = csv.DictReader(stream, delimiter=delimiter, strict=True)
    for row in reader:
        where = f"{path}:{reader.line_num}"
        if None in row or None in row.values():
            yield where, MalformedRow("it has not as many fields as the first line")
        else:
            yield where, {name: value or None for name, value in row.items()}


def _without_nulls(value: Any, *, column: bool = False) -> Any:
    """Remove null values: Arrow gives every struct all keys, and templates test whether a key exists.

    Args:
        column: keys are columns, which stay.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if column or item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _one_line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())
