"""Reading conversations from JSONL, JSON and Parquet files and from `datasets`, in the known schemas."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from data.file_hashes import hash_files
from data.text.schemas import Conversation, MalformedRow, Schema, find_schema, to_conversation
from eagle31.errors import UserError

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_NUM_SHOWN = 5


@dataclass(frozen=True)
class ReadResult:
    """The content of a source; malformed rows are not in `conversations`."""

    conversations: list[Conversation]
    num_rows: int
    malformed: list[tuple[str, str]]  # (location, reason), located as `file.jsonl:12` or `file.parquet[11]`
    categories: list[str] = field(default_factory=list)  # of the conversations, if a column has them

    @property
    def num_malformed(self) -> int:
        return len(self.malformed)


def read_conversations(
    source: str,
    *,
    split: str = "train",
    subset: str | None = None,
    prompt_column: str | None = None,
    response_column: str | None = None,
    require_answer: bool = True,
    max_malformed_fraction: float = 0.01,
    category_column: str | None = None,
    field: str = "data.train",
) -> ReadResult:
    """Read every conversation of `source` in order.

    The schema is determined from the first row: `messages` (OpenAI), `conversations` (ShareGPT), or a prompt
    and a response column (prompt/response, instruction/output, question/answer, or the two given names).

    Args:
        source: a .jsonl, .json or .parquet file, a directory written by `datasets.save_to_disk`, or a hub id.
        split: the split of a hub data set or a saved DatasetDict; files have none.
        subset: the subset of a hub data set that has several.
        require_answer: if false, prompts without an answer are read too, such as MT-Bench's `turns`.
        max_malformed_fraction: the fraction of the rows that may be malformed.
        category_column: the column of a row's category, which every row must have.
        field: the recipe's name for `source`, for error messages.

    Raises:
        UserError: the source does not exist, has no known schema, no conversation or too many malformed rows.
    """
    conversations: list[Conversation] = []
    categories: list[str] = []
    malformed: list[tuple[str, str]] = []
    schema: Schema | None = None
    for where, row in _rows(source, split, subset, field):
        try:
            if isinstance(row, MalformedRow):
                raise row
            if not isinstance(row, dict):
                raise MalformedRow(f"the row is a {type(row).__name__}, not an object")
            if schema is None:
                schema = find_schema(row, source, prompt_column, response_column, require_answer, field)
                _require_column(row, category_column, source, field)
            conversation = to_conversation(row, schema, require_answer)
            if category_column is not None:
                categories.append(_category(row, category_column))
            conversations.append(conversation)
        except MalformedRow as reason:
            malformed.append((where, str(reason)))
    num_rows = len(conversations) + len(malformed)
    if num_rows == 0:
        raise UserError(field, source, "It has no rows; give a source with conversations.")
    if not conversations:
        rows = "The only row is" if num_rows == 1 else f"All {num_rows} rows are"
        remedy = f"{rows} malformed; give a source with conversations. The first reasons:"
        raise UserError(field, source, remedy + first_reasons(malformed))
    if len(malformed) > max_malformed_fraction * num_rows:
        remedy = (
            f"{len(malformed)} of {num_rows} rows are malformed, more than data.max_malformed_fraction="
            f"{max_malformed_fraction} allows. Correct them or raise the limit. The first reasons:"
        )
        raise UserError(field, source, remedy + first_reasons(malformed))
    return ReadResult(conversations, num_rows, malformed, categories)


def _require_column(row: dict[str, Any], column: str | None, source: str, field: str) -> None:
    if column is not None and column not in row:
        columns = ", ".join(map(str, row))
        raise UserError(field, source, f"There is no column {column}. The columns are {columns}.")


def _category(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str | int) or not str(value).strip():
        raise MalformedRow(f"it has no {column}")
    return str(value).strip()


def first_reasons(left_out: Sequence[tuple[str, str]]) -> str:
    """Format the first few (location, reason) pairs, each on a new line."""
    shown = "".join(f"\n  {where}: {reason}" for where, reason in left_out[:_NUM_SHOWN])
    return shown + ("\n  ..." if len(left_out) > _NUM_SHOWN else "")


def source_fingerprint(
    source: str,
    *,
    split: str = "train",
    subset: str | None = None,
    field: str = "data.train",
    cache_dir: Path | None = None,
) -> str:
    """Return what identifies the content: a hash of the files.

    For a hub id it is the fingerprint that `datasets` derives from the commit.

    Args:
        cache_dir: the directory in which hashes are remembered; see `hash_files`.
    """
    if _is_file(source, field):
        return hash_files([Path(source).expanduser()], cache_dir=cache_dir)[0]
    dataset = _dataset(source, split, subset, field)
    if not Path(source).expanduser().is_dir():
        return dataset._fingerprint
    # The fingerprint of a saved data set stays when its files are changed.
    files = [Path(file["filename"]) for file in dataset.cache_files]
    hashes = hash_files(files, cache_dir=cache_dir)
    return hashlib.sha256(json.dumps([dataset.column_names, hashes]).encode()).hexdigest()


def _is_file(source: str, field: str) -> bool:
    path = Path(source).expanduser()
    if path.is_dir():
        return False
    named_as_file = path.suffix in (*_JSON_SUFFIXES, ".parquet")
    if path.exists() and not named_as_file:
        raise UserError(field, source, "Only .jsonl, .json and .parquet files can be read.")
    if not path.exists() and (named_as_file or not re.fullmatch(r"[\w.-]+/[\w.-]+", source)):
        raise UserError(
            field, source, "There is no such file or directory; give a path, or a hub id such as org/name."
        )
    return path.exists()


def _rows(source: str, split: str, subset: str | None, field: str) -> Iterator[tuple[str, Any]]:
    if not _is_file(source, field):
        rows: Iterator[Any] = iter(_dataset(source, split, subset, field))
    elif source.endswith(".parquet"):
        rows = _parquet_rows(source, field)
    else:
        yield from _json_rows(source, field)
        return
    for i, row in enumerate(rows):
        yield f"{source}[{i}]", _without_nulls(row)


def _parquet_rows(source: str, field: str) -> Iterator[Any]:
    try:
        file = pyarrow.parquet.ParquetFile(Path(source).expanduser())
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(field, source, f"It is not a readable Parquet file: {error}.") from error


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
    try:
        rows = json.loads(Path(source).expanduser().read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(field, source, f"It starts like a JSON array but is not valid: {error}.") from error
    for i, row in enumerate(rows):
        yield f"{source}[{i}]", row


def _dataset(source: str, split: str, subset: str | None, field: str) -> Dataset:
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


def _without_nulls(value: Any) -> Any:
    """Remove null values: Arrow gives every struct all keys, and templates test whether a key exists."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
