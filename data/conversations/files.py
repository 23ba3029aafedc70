"""The rows of files and data sets, each with the place where it is."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape, has_magic, iglob
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, TextIO

import fsspec
import pyarrow as pa
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    Json,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.features.features import _visit
from fsspec import AbstractFileSystem
from fsspec.compression import compr, register_compression
from fsspec.implementations.local import LocalFileSystem

from data.addresses import is_url
from data.conversations.schemas import MalformedRow, are_messages, listed
from data.file_hashes import hash_files
from data.hub import check_hub
from eagle31.errors import UserError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LINES = ".txt"
_PARQUET = ".parquet"
_SUFFIXES = (".jsonl", ".json", ".ndjson", *_DELIMITERS, _LINES, _PARQUET)
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_UTF_16 = ("\udcff\udcfe", "\udcfe\udcff")  # its first bytes, as they are read
_MAX_FIELD_CHARACTERS = 1 << 27  # of a CSV file; the default is 128 KiB, which a long answer exceeds
_BATCH_ROWS = 1000  # of a Parquet file in memory
_SAVED = ("state.json", "dataset_dict.json")  # in a directory that `datasets` has saved


@dataclass(frozen=True)
class DataFile:
    """A file with rows, on this machine or in object storage."""

    file_system: AbstractFileSystem
    path: str

    def __str__(self) -> str:
        return self.path if self.is_local else str(self.file_system.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        return isinstance(self.file_system, LocalFileSystem)

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yield (location, row) in order; a row that cannot be parsed is a `MalformedRow`."""
        suffix = _suffix(self.path)
        if suffix == _PARQUET:
            # By default a batch is as large as the first row group, which has no rows in a file without any.
            options = {"split": "train", "streaming": True, "batch_size": _BATCH_ROWS}
            yield from dataset_rows(
                str(self), load_dataset("parquet", data_files=escape(str(self)), **options)
            )
            return
        if "zstd" not in compr:  # Python has it from 3.14 on
            register_compression("zstd", lambda file, **_: pa.CompressedInputStream(file, "zstd"), "zst")
        # A byte that is not UTF-8 becomes a character that no text may have, in its row alone.
        options = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
        with self.file_system.open(self.path, "rt", compression="infer", **options) as stream:
            if suffix == _LINES:
                yield from _prompt_rows(str(self), stream)
            elif suffix in _DELIMITERS:
                yield from _csv_rows(str(self), stream, _DELIMITERS[suffix])
            else:
                yield from _json_rows(str(self), stream)


def fingerprints(files: Sequence[DataFile]) -> list[str]:
    """Return what identifies the content of each file: a hash, or what object storage says of its version."""
    if all(file.is_local for file in files):
        return hash_files([Path(file.path) for file in files])
    return [file.file_system.ukey(file.path) for file in files]


def find_files(location: str, field: str, split: str, subset: str | None) -> list[DataFile] | None:
    """Return the files of a path, a pattern, a URL or a directory; None: `datasets` has saved it, or the Hub.

    The files of a directory are those that `datasets` finds for its split.

    Raises:
        UserError: there are none.
    """
    path = Path(location).expanduser()
    if is_file(location, field):
        system, paths = _matched(location)
    elif (splits := _splits(path, subset)) is not None:
        system = fsspec.filesystem("file")
        if split not in splits:
            remedy = f"such as {location}/*.jsonl to read the files of all."
            reason = f"It has no split {split}, only {listed(splits)}; choose one, or give a pattern {remedy}"
            raise UserError(field, location, reason)
        paths = splits[split]
    else:
        return None
    files = [DataFile(system, one) for one in paths if _suffix(one) in _SUFFIXES]
    if not files:
        remedy = (
            f"It has no files that end in {', '.join(_SUFFIXES)}; give them, such as {location}/*.parquet."
        )
        raise UserError(field, location, remedy)
    return files


def unread_files(location: str, field: str, subset: str | None) -> list[str]:
    """Return the files of a directory that are in none of its splits, or of a pattern that have no rows."""
    if is_file(location, field):
        system, paths = _matched(location)
        return [one for one in paths if _suffix(one) not in _SUFFIXES and system.isfile(one)]
    path = Path(location).expanduser()
    splits = _splits(path, subset)
    if splits is None:
        return []
    read = {Path(file).resolve() for files in splits.values() for file in files}
    found = sorted(one for one in path.rglob("*") if _suffix(one.name) in _SUFFIXES)
    return [str(one.relative_to(path)) for one in found if one.resolve() not in read]


def _matched(location: str) -> tuple[AbstractFileSystem, list[str]]:
    """Return the paths of a file, a pattern or a URL, also those of other files and of directories."""
    path = location if is_url(location) else str(Path(location).expanduser())
    system, found = fsspec.core.url_to_fs(path)
    return system, sorted(system.glob(found)) if has_magic(found) and not system.exists(found) else [found]


def _splits(path: Path, subset: str | None) -> Mapping[str, list[str]] | None:
    """Return the files of each split of a directory; None for other paths and what `datasets` has saved."""
    if not path.is_dir() or any((path / name).exists() for name in _SAVED):
        return None
    found: Mapping[str, list[str]] = load_dataset_builder(str(path), subset).config.data_files
    return found


def is_file(location: str, field: str) -> bool:
    """Return whether the location is a file, a pattern or a URL, and otherwise a directory or a hub id.

    Raises:
        UserError: it is none of them, or a file of another kind.
    """
    path = Path(location).expanduser()
    if path.is_dir() or is_url(location):
        return is_url(location)
    named_as_file = _suffix(location) in _SUFFIXES
    if path.exists() and not (named_as_file and path.is_file()):
        remedy = f"Only files that end in {', '.join(_SUFFIXES)} can be read"
        raise UserError(field, location, f"{remedy}, also compressed ({', '.join(_COMPRESSIONS)}).")
    there = path.exists() or (has_magic(location) and any(iglob(str(path), recursive=True)))
    if not there and (named_as_file or not re.fullmatch(r"[\w.-]+/[\w.-]+", location)):
        remedy = "There is no such file or directory; give a path, or a hub id such as org/name."
        raise UserError(field, location, remedy)
    return there


def _suffix(path: str) -> str:
    """Return what a file's name ends in, without that of a compression."""
    found = PurePath(path)
    if found.suffix.lower() in _COMPRESSIONS:
        found = found.with_suffix("")
    return found.suffix.lower()


def load(location: str, field: str, split: str, subset: str | None, revision: str | None) -> Dataset:
    """Return a data set that `datasets` has saved, or one of the Hub.

    Raises:
        UserError: it cannot be loaded, or has no such split.
    """
    path = Path(location).expanduser()
    try:
        if not path.is_dir():
            check_hub(field, location, "dataset")
            return load_dataset(location, subset, split=split, revision=revision)
        loaded = load_from_disk(str(path))
        if isinstance(loaded, DatasetDict) and split not in loaded:
            raise UserError(field, location, f"It has no split {split}, only {listed(loaded)}.")
        found = loaded[split] if isinstance(loaded, DatasetDict) else loaded
        found.data.table.validate(full=True)  # lists with wrong offsets would be read beyond their ends
        return found
    except UserError:
        raise
    except Exception as error:  # `datasets` believes what the files say, and raises whatever comes of it
        reason = f"`datasets` cannot load it (split {split}): {one_line(error)}"
        raise UserError(field, location, reason) from error


def dataset_rows(name: str, dataset: Dataset | IterableDataset) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) of what `datasets` reads, without the null values of structs.

    Of images and sounds only the presence counts: they are not decoded.
    """
    if isinstance(dataset, Dataset):  # which may have been saved with a format, such as torch
        if not len(dataset):  # `datasets` does not make an iterable of it
            return
        dataset = dataset.with_format(None).to_iterable_dataset()
    for index, row in enumerate(dataset.cast(_visit(dataset.features, _undecoded))):
        yield f"{name}[{index}]", _without_nulls(row, column=True)


def _undecoded(feature: Any) -> Any:
    is_media = hasattr(feature, "decode") and not isinstance(feature, Json)
    return replace(feature, decode=False) if is_media else feature


def _prompt_rows(name: str, stream: TextIO) -> Iterator[tuple[str, Any]]:
    """Yield a row for each line that is not empty."""
    for number, line in enumerate(stream, start=1):
        if number == 1 and line.startswith(_UTF_16):
            raise ValueError("it is UTF-16; convert it to UTF-8")
        if text := line.strip():
            yield f"{name}:{number}", {"prompt": text}


def _json_rows(name: str, stream: TextIO) -> Iterator[tuple[str, Any]]:
    """Yield the rows of JSON lines, or those of a file that is one array or one object."""
    start, first = next(((number, line) for number, line in enumerate(stream, 1) if line.strip()), (1, ""))
    lines: Iterable[str] = chain([first], stream)
    row = _parsed(first)
    spans_lines = first.lstrip().startswith("[") or first.rstrip().endswith(("{", "["))
    if not are_messages(row) and (spans_lines or _rows_of(row) != [row]):
        text = first + stream.read()
        rows = _rows_of(_parsed(text))
        if rows is not None:
            yield from ((f"{name}[{index}]", row) for index, row in enumerate(rows))
            return
        lines = io.StringIO(text, newline="")
    for number, line in enumerate(lines, start):
        if line.strip():
            yield f"{name}:{number}", _parsed(line)


def _rows_of(value: Any) -> list[Any] | None:
    """Return the rows of a file that is one value: those of an array or an object's `data`, or the object."""
    if isinstance(value, dict):
        rows = value.get("data")
        has_rows = isinstance(rows, list) and any(isinstance(row, dict) for row in rows)
        return rows if has_rows and not are_messages(rows) else [value]
    return value if isinstance(value, list) and not are_messages(value) else None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # of numbers and nested brackets too
        return MalformedRow(f"the line is not JSON ({error})")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raise ValueError where a key has two values, of which one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs) and (twice := [key for key, value in pairs if found[key] != value]):
        raise ValueError(f"{twice[0]} has two values")
    return found


def _csv_rows(name: str, stream: TextIO, delimiter: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file whose first line names the columns; an empty field is None."""
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    reader = csv.DictReader(stream, delimiter=delimiter, strict=True)
    columns = reader.fieldnames or []
    if repeated := [name for name in columns if columns.count(name) > 1]:
        raise ValueError(f"its first line names the column {repeated[0]} more than once")
    for row in reader:
        where = f"{name}:{reader.line_num}"
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


def one_line(error: Exception) -> str:
    """Return what an error says, without line breaks."""
    return " ".join((str(error) or type(error).__name__).split())
