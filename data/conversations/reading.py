"""Reading conversations from files, saved data sets and the Hub."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from data.conversations.columns import Layout, NoLayout, find_layout
from data.conversations.files import DataFile, dataset_rows, find_files, fingerprints, load, one_line
from data.conversations.preformatted import SplitText, not_split
from data.conversations.schemas import (
    NO_ANSWER,
    REGENERATE,
    Conversation,
    MalformedRow,
    are_messages,
    to_conversation,
    usable,
)
from data.file_hashes import hash_files
from eagle31.errors import UserError

_ALSO_READ = ("id", "tools", "functions")  # by `to_conversation`
_NUM_SHOWN, _SHOWN_CHARACTERS = 5, 300
_FIRST_ROWS = 1000  # a source without a conversation among so many is not read to its end
_MANY_ROWS = 100_000  # from which on a source with too many malformed ones is not read to its end


@dataclass(frozen=True)
class Source:
    """Where conversations come from, and which columns they have.

    Each row is read by its columns; see `columns.find_layout`.

    Args:
        location: a .jsonl, .json, .csv, .tsv, .txt (a prompt per line) or .parquet file, the text ones also
            compressed (.gz, .bz2, .xz, .zst); a pattern or a URL of such files; a directory of them, or one
            that `datasets.save_to_disk` has written; or a hub id.
        field: the recipe's name for `location`, for error messages.
        split: the split of a hub data set or a directory; files have none.
        subset: the subset of a hub data set that has several.
        prompt_column: the column of the user's text, or of messages; None: it is found by name.
        response_column: the column of the assistant's text; None: it is found by name.
        require_answer: if false, prompts without an answer are read too.
        revision: the branch, tag or commit of a hub data set.
        max_malformed_fraction: the fraction of the rows that may be malformed.
    """

    location: str
    field: str = "data.train"
    split: str = "train"
    subset: str | None = None
    prompt_column: str | None = None
    response_column: str | None = None
    require_answer: bool = True
    revision: str | None = None
    max_malformed_fraction: float = 0.01

    def reader(self, split_text: SplitText = not_split) -> "ConversationReader":
        """Return an iterator over the conversations; see `ConversationReader`."""
        return ConversationReader(self, split_text)

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yield (location, row) in order; a row that cannot be parsed is a `MalformedRow`.

        Raises:
            UserError: the source does not exist or cannot be read.
        """
        with self._readable():
            files = self._files()
            if files is None:
                yield from dataset_rows(self.location, self._load())
        for file in files or []:
            with self._readable(str(file)):
                yield from file.rows()

    def fingerprint(self) -> str:
        """Return what identifies the content: a hash of the files.

        For a hub id it is the fingerprint that `datasets` derives from the commit.
        """
        with self._readable():
            if (found := self._files()) is not None:
                hashes = fingerprints(found)
                return hashes[0] if len(hashes) == 1 else _digest(hashes)
        dataset = self._load()
        if not Path(self.location).expanduser().is_dir():
            return dataset._fingerprint
        # The fingerprint of a saved data set stays when its files are changed.
        files = [Path(file["filename"]) for file in dataset.cache_files]
        return _digest([dataset.column_names, hash_files(files)])

    def _files(self) -> list[DataFile] | None:
        return find_files(self.location, self.field, self.split, self.subset)

    def _load(self) -> Dataset:
        return load(self.location, self.field, self.split, self.subset, self.revision)

    @contextmanager
    def _readable(self, file: str | None = None) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # a decompressor, a parser, Arrow and object storage each have their own
            what = "It" if file in (None, self.location) else file
            raise UserError(self.field, self.location, f"{what} cannot be read: {one_line(error)}") from error

    @property
    def columns(self) -> tuple[str | None, str | None]:
        """The chosen columns."""
        return self.prompt_column, self.response_column


class ConversationReader:
    """Iterates over the conversations of a source in order, of which only a few are in memory.

    Rows that make no conversation are left out: `malformed` has those that are wrong, and `left_out` those of
    which nothing can be used, such as empty ones, as (location, reason), located as `file.jsonl:12` or
    `file.parquet[11]`. `cut` counts the rows of which a part is used, by what is cut, and
    `latest_cut` is that of the latest. `used` has the columns that make the conversations, and `unused` the
    others that they have.
    """

    def __init__(self, source: Source, split_text: SplitText) -> None:
        self.source, self._split_text = source, split_text
        self._start()

    def _start(self) -> None:
        self.num_conversations = 0
        self.malformed: list[tuple[str, str]] = []
        self.left_out: list[tuple[str, str]] = []
        self.cut = Counter[str]()
        self.latest_cut: list[str] = []
        self._used: dict[str, None] = {}
        self._seen: dict[str, None] = {}
        self._unknown: str | None = None  # the first reason of an unknown layout

    @property
    def num_rows(self) -> int:
        return self.num_conversations + len(self.malformed) + len(self.left_out)

    @property
    def used(self) -> list[str]:
        return list(self._used)

    @property
    def unused(self) -> list[str]:
        return [name for name in self._seen if name not in (*self._used, *_ALSO_READ)]

    def __iter__(self) -> Iterator[Conversation]:
        """Yield the conversations.

        Raises:
            UserError: the source does not exist, has no conversation among its first rows, or, at its end,
                too many malformed rows.
        """
        self._start()
        for where, found in self.source.rows():
            row = {"messages": found} if are_messages(found) else found
            cut: list[str] = []
            try:
                layout = self._layout(row)
                messages, cut = usable(layout.messages(row, self._split_text), row)
                conversation = to_conversation(row, messages, self.source.require_answer)
            except MalformedRow as reason:
                left_out = self.left_out if cut else self.malformed
                left_out.append((where, f"{reason} ({'; '.join(cut)})" if cut else str(reason)))
                if self.num_rows == _FIRST_ROWS and not self.num_conversations:
                    self._check()
                if len(self.malformed) > self.source.max_malformed_fraction * max(self.num_rows, _MANY_ROWS):
                    self._check()
                continue
            self.cut.update(cut)
            self.latest_cut = cut
            self._used |= dict.fromkeys(layout.columns)
            self._seen |= dict.fromkeys(row)
            self.num_conversations += 1
            yield conversation
        self._check()

    def _layout(self, row: Any) -> Layout:
        if isinstance(row, MalformedRow):
            raise row
        if not isinstance(row, dict):
            raise MalformedRow(f"the row is a {type(row).__name__}, not an object")
        source = self.source
        group = source.field.removesuffix(".source") if source.field.endswith(".source") else "data"
        try:
            return find_layout(row, *source.columns, source.require_answer, group)
        except NoLayout as error:
            self._unknown = self._unknown or str(error)
            raise

    def _check(self) -> None:
        source, num_rows, num_malformed = self.source, self.num_rows, len(self.malformed)
        if num_rows == 0:
            remedy = "It has no rows; give a source with conversations."
            raise UserError(source.field, source.location, remedy)
        first = self.malformed[0][1] if self.malformed else ""
        if not self.num_conversations and first == self._unknown:
            raise UserError(source.field, source.location, first)
        if self.num_conversations and num_malformed <= source.max_malformed_fraction * num_rows:
            return
        remedy = f"{num_malformed} of {num_rows} rows are malformed"
        if self.left_out:
            remedy += f", and of {len(self.left_out)} nothing can be used"
        remedies = ["Correct them"]
        if self.num_conversations:
            remedy += f", more than {100 * source.max_malformed_fraction:g}%"
            if source.field.startswith("data."):
                remedies.append("have them left out with a larger data.max_malformed_fraction")
        left_out = self.malformed or self.left_out
        if any(NO_ANSWER in reason for _, reason in left_out):
            remedies.append(REGENERATE)
        remedy += f". {', or '.join(remedies)}. The first reasons:{first_reasons(left_out)}"
        raise UserError(source.field, source.location, remedy)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def first_reasons(left_out: Sequence[tuple[str, str]]) -> str:
    """Format the first few (location, reason) pairs, each on a new line; long reasons are cut."""
    shown = "".join(f"\n  {where}: {reason[:_SHOWN_CHARACTERS]}" for where, reason in left_out[:_NUM_SHOWN])
    return shown + ("\n  ..." if len(left_out) > _NUM_SHOWN else "")


def print_left_out(what: str, left_out: Sequence[tuple[str, str]]) -> None:
    """Print the number of things that are left out and the first reasons."""
    print(f"data: {len(left_out):,} {what} and left out:{first_reasons(left_out)}", flush=True)
