"""The rows of a file or a data set, read one after another: JSON, CSV, Parquet and `datasets`."""

import csv
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pyarrow.parquet
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from data.conversations.schemas import MalformedRow
from eagle31.errors import UserError

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_SUFFIXES = (*_JSON_SUFFIXES, *_DELIMITERS, ".parquet")
_SPACES = re.compile(r"\s*")
_UNPACK, _CONVERT, _RENAME = "unpack it", "convert it to UTF-8", "name it .parquet"
# The first bytes of files that other programs write under the names that are read here.
_CONTENTS = {
    b"version https://git-lfs": ("a Git LFS pointer", "run `git lfs pull` where it was cloned"),
    b"\x1f\x8b": ("compressed with gzip", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", _UNPACK),
    b"\xfd7zXZ": ("compressed with xz", _UNPACK),
    b"BZh": ("compressed with bzip2", _UNPACK),
    b"PK\x03\x04": ("a ZIP archive", _UNPACK),
    b"PAR1": ("a Parquet file", _RENAME),
    b"\xff\xfe": ("UTF-16 or UTF-32", _CONVERT),
    b"\xfe\xff": ("UTF-16", _CONVERT),
}
# Of one conversation; a binary file may have no line break at all. Python takes 20 times as much for one of
# very many turns.
_MAX_LINE_BYTES = 1 << 27
_ARRAY_CHARACTERS = 1 << 20  # of a JSON array that are read at a time


def rows(source: str, split: str, subset: str | None, field: str) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) in order, located as `file.jsonl:12` or `file.parquet[11]`.

    A row that cannot be parsed is a `MalformedRow`.

    Raises:
        UserError: the source does not exist or cannot be read.
    """
    try:
        yield from _rows(source, split, subset, field)
    except OSError as error:
        raise UserError(field, source, f"It cannot be read: {error.strerror or error}.") from error


def _rows(source: str, split: str, subset: str | None, field: str) -> Iterator[tuple[str, Any]]:
    if not is_file(source, field):
        found = _dataset_rows(load(source, split, subset, field), source, field)
    elif source.endswith(".parquet"):
        found = _parquet_rows(source, field)
    else:
        _refuse_other_content(source, field)
        delimited = Path(source).suffix in _DELIMITERS
        yield from (_delimited_rows if delimited else _json_rows)(source, field)
        return
    for i, row in enumerate(found):
        without = row if isinstance(row, MalformedRow) else _without_nulls(row, column=True)
        yield f"{source}[{i}]", without


def is_file(source: str, field: str) -> bool:
    """Return whether the source is a file, and otherwise a directory or a hub id.

    Raises:
        UserError: it is none of them, or a file of another kind.
    """
    try:
        path = Path(source).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(field, source, f"It cannot be read: {reason}.") from error
    if is_directory:
        return False
    named_as_file = path.suffix in _SUFFIXES
    if exists and not named_as_file:
        raise UserError(field, source, "Only .jsonl, .json, .csv, .tsv and .parquet files can be read.")
    if exists and not path.is_file():
        raise UserError(field, source, "It is no regular file, which can be read more than once; give one.")
    if not exists and (named_as_file or not re.fullmatch(r"[\w.-]+/[\w.-]+", source)):
        raise UserError(
            field, source, "There is no such file or directory; give a path, or a hub id such as org/name."
        )
    return exists


def load(source: str, split: str, subset: str | None, field: str) -> Dataset:
    """Return a data set that `datasets` has saved, or one of the hub.

    Raises:
        UserError: it cannot be loaded, or has no such split.
    """
    path = Path(source).expanduser()
    try:
        loaded = load_from_disk(str(path)) if path.is_dir() else load_dataset(source, subset, split=split)
    # Raised for a missing name, split, config or network, and for a data set that is a loading script. Of a
    # damaged directory, `datasets` believes what its JSON files say, and raises whatever comes of it.
    except Exception as error:
        reason = " ".join((str(error) or type(error).__name__).split())
        raise UserError(field, source, f"`datasets` cannot load it (split {split}): {reason}") from error
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            remedy = f"It has the splits {', '.join(loaded)}, not {split}; name one of them."
            raise UserError(field, source, remedy)
        return loaded[split]
    return loaded


def _refuse_other_content(source: str, field: str) -> None:
    """Raise UserError for a file whose first bytes say that it is no UTF-8 text."""
    with Path(source).expanduser().open("rb") as stream:
        head = stream.read(max(map(len, _CONTENTS)))
    for signature, (what, remedy) in _CONTENTS.items():
        if head.startswith(signature):
            raise UserError(field, source, f"It is {what}; {remedy}.")


def _parquet_rows(source: str, field: str) -> Iterator[Any]:
    try:
        file = pyarrow.parquet.ParquetFile(Path(source).expanduser())
        for batch in file.iter_batches(batch_size=1024):
            try:
                found = batch.to_pylist()
            except (ValueError, OverflowError):  # of UTF-8, and of dates that Python does not have
                found = [_row_of_batch(batch, index) for index in range(len(batch))]
            yield from found
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: of names that are not UTF-8
        raise UserError(field, source, f"It is not a readable Parquet file: {_reason(error)}.") from error


def _row_of_batch(batch: pyarrow.RecordBatch, index: int) -> Any:
    try:
        return batch.slice(index, 1).to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return MalformedRow(_reason(error))


def _dataset_rows(dataset: Dataset, source: str, field: str) -> Iterator[Any]:
    try:
        # Lists with wrong offsets would be read beyond their ends.
        dataset.data.table.validate(full=True)
        yield from dataset
    except (pyarrow.ArrowException, ValueError, OverflowError, KeyError, TypeError) as error:
        raise UserError(field, source, f"The data set is damaged: {_reason(error)}.") from error


def _delimited_rows(source: str, field: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a CSV or TSV file, whose first line names the columns; an empty field is None."""
    path = Path(source).expanduser()
    csv.field_size_limit(_MAX_LINE_BYTES)  # the default is 128 KiB, which a long answer exceeds
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
            remedy = f"It is not a readable file of UTF-8 and commas or tabs: {_reason(error)}."
            raise UserError(field, f"{source}:{reader.line_num}", remedy) from error


def _json_rows(source: str, field: str) -> Iterator[tuple[str, Any]]:
    path = Path(source).expanduser()
    with path.open("rb") as stream:
        if stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _json_array(source, field)
            return
        stream.seek(0)
        for number, line in enumerate(iter(partial(stream.readline, _MAX_LINE_BYTES), b""), start=1):
            if len(line) == _MAX_LINE_BYTES:
                remedy = f"The line is longer than {_MAX_LINE_BYTES:,} bytes; give one conversation a line."
                raise UserError(field, f"{source}:{number}", remedy)
            if not line.strip():
                continue
            try:
                yield f"{source}:{number}", json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # of UTF-8, numbers and nested brackets too
                yield f"{source}:{number}", MalformedRow(f"the line is not JSON ({_reason(error)})")


def _reason(error: Exception) -> str:
    """Return an error's message, which for UTF-8 may name bytes of half a line."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is {error.object[error.start]:#04x}, which is not UTF-8"
    return " ".join(str(error).split())


def _json_array(source: str, field: str) -> Iterator[tuple[str, Any]]:
    number = 0
    with Path(source).expanduser().open(encoding="utf-8-sig") as stream:
        try:
            for item in _array_items(stream):
                yield f"{source}[{number}]", item
                number += 1
        except (ValueError, RecursionError) as error:  # of UTF-8 too
            remedy = f"It starts like a JSON array but is not valid after {number:,} rows: {_reason(error)}."
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
        if len(text) - position > _MAX_LINE_BYTES:
            raise ValueError(f"the next one is longer than {_MAX_LINE_BYTES:,} characters")
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


def _without_nulls(value: Any, *, column: bool = False) -> Any:
    """Remove null values: Arrow gives every struct all keys, and templates test whether a key exists.

    Args:
        column: keys are columns, which stay.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if column or item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
