"""Reading conversations from files and data sets in the known schemas, one after another or all at once."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.conversations.rows import is_file, load, rows
from data.conversations.schemas import (
    Columns,
    Conversation,
    MalformedRow,
    Schema,
    find_schema,
    listed,
    to_conversation,
)
from data.file_hashes import hash_files
from eagle31.errors import UserError

_NUM_SHOWN, _SHOWN_CHARACTERS = 5, 300


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


class ConversationReader:
    """Iterates over the conversations of a source in order, of which only a few are in memory.

    The schema is determined from the first row: `messages` (OpenAI), `conversations` (ShareGPT), or a prompt
    and a response column (prompt/response, instruction/output, question/answer, or the two given names).

    Args:
        source: a .jsonl, .json, .csv, .tsv or .parquet file, a directory written by `datasets.save_to_disk`,
            or a hub id.
        split: the split of a hub data set or a saved DatasetDict; files have none.
        subset: the subset of a hub data set that has several.
        prompt_column: the column of the user's text; None: it is found by name.
        input_column: the column of a text that follows the user's, such as Alpaca's `input`.
        response_column: the column of the assistant's text; None: it is found by name.
        require_answer: if false, prompts without an answer are read too, such as MT-Bench's `turns`.
        max_malformed_fraction: the fraction of the rows that may be malformed.
        category_column: the column of a row's category, which every row must have.
        field: the recipe's name for `source`, for error messages.
    """

    def __init__(
        self,
        source: str,
        *,
        split: str = "train",
        subset: str | None = None,
        prompt_column: str | None = None,
        input_column: str | None = None,
        response_column: str | None = None,
        require_answer: bool = True,
        max_malformed_fraction: float = 0.01,
        category_column: str | None = None,
        field: str = "data.train",
    ) -> None:
        self.source = source
        self.num_conversations = 0
        self.malformed: list[tuple[str, str]] = []  # (location, reason)
        self.category = ""  # of the latest conversation, if a column has it
        self._split = split
        self._subset = subset
        self._columns = Columns(prompt_column, input_column, response_column)
        self._require_answer = require_answer
        self._max_malformed_fraction = max_malformed_fraction
        self._category_column = category_column
        self._field = field

    @property
    def num_rows(self) -> int:
        return self.num_conversations + len(self.malformed)

    def __iter__(self) -> Iterator[Conversation]:
        """Yield the conversations; malformed rows are counted and left out.

        Raises:
            UserError: the source does not exist, has no known schema, or, at its end, no conversation or too
                many malformed rows.
        """
        self.num_conversations, self.malformed = 0, []
        schema: Schema | None = None
        for where, row in rows(self.source, self._split, self._subset, self._field):
            try:
                if isinstance(row, MalformedRow):
                    raise row
                if not isinstance(row, dict):
                    raise MalformedRow(f"the row is a {type(row).__name__}, not an object")
                if schema is None:
                    schema = find_schema(row, self.source, self._columns, self._require_answer, self._field)
                    _require_column(row, self._category_column, self.source, self._field)
                conversation = to_conversation(row, schema, self._require_answer)
                if self._category_column is not None:
                    self.category = _category(row, self._category_column)
            except MalformedRow as reason:
                self.malformed.append((where, str(reason)))
                continue
            self.num_conversations += 1
            yield conversation
        self._check()

    def _check(self) -> None:
        num_rows, num_malformed = self.num_rows, len(self.malformed)
        if num_rows == 0:
            raise UserError(self._field, self.source, "It has no rows; give a source with conversations.")
        if not self.num_conversations:
            which = "The only row is" if num_rows == 1 else f"All {num_rows} rows are"
            remedy = f"{which} malformed; give a source with conversations. The first reasons:"
            raise UserError(self._field, self.source, remedy + first_reasons(self.malformed))
        if num_malformed > self._max_malformed_fraction * num_rows:
            remedy = (
                f"{num_malformed} of {num_rows} rows are malformed, more than data.max_malformed_fraction="
                f"{self._max_malformed_fraction} allows. Correct them or raise the limit. The first reasons:"
            )
            raise UserError(self._field, self.source, remedy + first_reasons(self.malformed))


def read_conversations(source: str, **settings: Any) -> ReadResult:
    """Read every conversation of `source` in order, with the settings of `ConversationReader`.

    Raises:
        UserError: the source does not exist, has no known schema, no conversation or too many malformed rows.
    """
    reader = ConversationReader(source, **settings)
    conversations: list[Conversation] = []
    categories: list[str] = []
    for conversation in reader:
        conversations.append(conversation)
        if settings.get("category_column") is not None:
            categories.append(reader.category)
    return ReadResult(conversations, reader.num_rows, reader.malformed, categories)


def _require_column(row: dict[str, Any], column: str | None, source: str, field: str) -> None:
    if column is not None and column not in row:
        columns = listed(row)
        raise UserError(field, source, f"There is no column {column}. The columns are {columns}.")


def _category(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str | int) or not str(value).strip():
        raise MalformedRow(f"it has no {column}")
    return str(value).strip()


def first_reasons(left_out: Sequence[tuple[str, str]]) -> str:
    """Format the first few (location, reason) pairs, each on a new line; long reasons are cut."""
    shown = "".join(f"\n  {where}: {reason[:_SHOWN_CHARACTERS]}" for where, reason in left_out[:_NUM_SHOWN])
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
    if is_file(source, field):
        return hash_files([Path(source).expanduser()], cache_dir=cache_dir)[0]
    dataset = load(source, split, subset, field)
    if not Path(source).expanduser().is_dir():
        return dataset._fingerprint
    # The fingerprint of a saved data set stays when its files are changed.
    files = [Path(file["filename"]) for file in dataset.cache_files]
    hashes = hash_files(files, cache_dir=cache_dir)
    return hashlib.sha256(json.dumps([dataset.column_names, hashes]).encode()).hexdigest()


@dataclass(frozen=True)
class Source:
    """Where conversations come from, and which columns they have; see `ConversationReader`."""

    location: str
    field: str  # the recipe's name for `location`
    split: str = "train"
    subset: str | None = None
    prompt_column: str | None = None
    input_column: str | None = None
    response_column: str | None = None
    require_answer: bool = True

    def reader(self, max_malformed_fraction: float) -> ConversationReader:
        return ConversationReader(
            self.location,
            split=self.split,
            subset=self.subset,
            prompt_column=self.prompt_column,
            input_column=self.input_column,
            response_column=self.response_column,
            require_answer=self.require_answer,
            max_malformed_fraction=max_malformed_fraction,
            field=self.field,
        )

    def fingerprint(self, cache_dir: Path) -> str:
        """Return what identifies the content; see `source_fingerprint`."""
        return source_fingerprint(
            self.location, split=self.split, subset=self.subset, field=self.field, cache_dir=cache_dir
        )

    @property
    def columns(self) -> list[str | None]:
        """What identifies the chosen columns; the input column is in it only where it is chosen."""
        chosen = [self.prompt_column, self.response_column]
        return chosen if self.input_column is None else [*chosen, self.input_column]
