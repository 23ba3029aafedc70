"""The rows of a file or a data set, read one after another: JSON, CSV, Parquet and `datasets`."""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pyarrow.parquet
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from data.text.schemas import MalformedRow
from eagle31.errors import UserError

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_SUFFIXES = (*_JSON_SUFFIXES, *_DELIMITERS, ".parquet")
_SPACES = re.compile(r"\s*")
_ARRAY_CHARACTERS = 1 << 20  # of a JSON array that are read at a time


def rows(source: str, split: str, subset: str | None, field: str) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) in order, located as `file.jsonl:12` or `file.parquet[11]`.

    A row that cannot be parsed is a `MalformedRow`.

    Raises:
        UserError: the source does not exist or cannot be read.
    """
    if not is_file(source, field):
        found: Iterator[Any] = iter(load(source, split, subset, field))
    elif source.endswith(".parquet"):
        found = _parquet_rows(source, field)
    elif Path(source).suffix in _DELIMITERS:
        yield from _delimited_rows(source, field)
        return
    else:
        yield from _json_rows(source, field)
        return
    for i, row in enumerate(found):
        yield f"{source}[{i}]", {column: _without_nulls(value) for column, value in row.items()}


def is_file(source: str, field: str) -> bool:
    """Return whether the source is a file, and otherwise a directory or a hub id.

    Raises:
        UserError: it is none of them, or a file of another kind.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return False
    named_as_file = path.suffix in _SUFFIXES
    if path.exists() and not named_as_file:
        raise UserError(field, source, "Only .jsonl, .json, .csv, .tsv and .parquet files can be read.")
    if not path.exists() and (named_as_file or not re.fullmatch(r"[\w.-]+/[\w.-]+", source)):
        raise UserError(
            field, source, "There is no such file or directory; give a path, or a hub id such as org/name."
        )
    return path.exists()


def load(source: str, split: str, subset: str | None, field: str) -> Dataset:
    """Return a data set that `datasets` has saved, or one of the hub.

    Raises:
        UserError: it cannot be loaded, or has no such split.
    """
    path = Path(source).expanduser()
    try:
        loaded = load_from_disk(str(path)) if path.is_dir() else load_dataset(source, subset, split=split)
    except (OSError, ValueError) as error:  # raised for a missing name, split, config or network
        reason = " ".join(str(error).split())
        raise UserError(field, source, f"`datasets` cannot load it (split {split}): {reason}") from error
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            remedy = f"It has the splits {', '.join(loaded)}, not {split}; name one of them."
            raise UserError(field, source, remedy)
        return loaded[split]
    return loaded


def _parquet_rows(source: str, field: str) -> Iterator[Any]:
    try:
        file = pyarrow.parquet.ParquetFile(Path(source).expanduser())
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(field, source, f"It is not a readable Parquet file: {error}.") from error


def _delimited_rows(source: str, field: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a CSV or TSV file, whose first line names the columns; an empty field is None."""
    path = Path(source).expanduser()
    csv.field_size_limit(sys.maxsize)  # the default is 128 KiB, which a long answer exceeds
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=_DELIMITERS[path.suffix], strict=True)
        try:
            columns = next(reader, [])
            if len(set(columns)) < len(columns):
                raise UserError(field, source, f"Two columns have the same name: {', '.join(columns)}.")
            line = reader.line_num + 1
            for values in reader:
                where, line = f"{source}:{line}", reader.line_num + 1
                if len(values) == len(columns):
                    yield where, {name: value or None for name, value in zip(columns, values, strict=True)}
                elif values:
                    counts = f"it has {len(values)} fields, and the first line has {len(columns)}"
                    yield where, MalformedRow(counts)
        except (csv.Error, UnicodeDecodeError) as error:
            remedy = f"It is not a readable file of UTF-8 and commas or tabs: {error}."
            raise UserError(field, f"{source}:{reader.line_num}", remedy) from error


def _json_rows(source: str, field: str) -> Iterator[tuple[str, Any]]:
    path = Path(source).expanduser()
    with path.open("rb") as stream:
        if stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _json_array(source, field)
            return
        stream.seek(0)
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                yield f"{source}:{number}", json.loads(line.decode("utf-8-sig"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                yield f"{source}:{number}", MalformedRow(f"the line is not JSON ({error})")


def _json_array(source: str, field: str) -> Iterator[tuple[str, Any]]:
    number = 0
    with Path(source).expanduser().open(encoding="utf-8-sig") as stream:
        try:
            for item in _array_items(stream):
                yield f"{source}[{number}]", item
                number += 1
        except ValueError as error:  # of UTF-8 too
            remedy = f"It starts like a JSON array but is not valid after {number:,} rows: {error}."
            raise UserError(field, source, remedy) from error


def _array_items(stream: TextIO) -> Iterator[Any]:
    """Yield the items of a JSON array, of which only a part is in memory.

    Raises:
        ValueError: it is not valid.
    """
    decode = json.JSONDecoder().raw_decode
    text, position = "", 0

    def read_more() -> bool:
        nonlocal text, position
        # Twice as much each time, so that a long item is not parsed over and over.
        added = stream.read(max(len(text) - position, _ARRAY_CHARACTERS))
        text, position = text[position:] + added, 0
        return bool(added)

    def skip_spaces() -> str:
        """Move to the next character that is no white space, and return it."""
        nonlocal position
        while True:
            position = _SPACES.match(text, position).end()  # type: ignore[union-attr]
            if position < len(text):
                return text[position]
            if not read_more():
                raise ValueError("it ends early")

    separator = skip_spaces()
    position += 1
    if skip_spaces() == "]":
        separator, position = "]", position + 1
    while separator != "]":
        skip_spaces()
        while True:
            try:
                item, end = decode(text, position)
                reason = "it ends early"
                if end < len(text):  # otherwise a number could have more digits
                    break
            except json.JSONDecodeError as error:
                reason = error.msg
            if not read_more():
                raise ValueError(reason)
        position = end
        yield item
        separator = skip_spaces()
        position += 1
        if separator not in ",]":
            raise ValueError("Expecting ',' delimiter")
    if (text[position:] + stream.read()).strip():
        raise ValueError("there is more after its end")


def _without_nulls(value: Any) -> Any:
    """Remove null values: Arrow gives every struct all keys, and templates test whether a key exists."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
