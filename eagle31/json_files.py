"""JSON and text files that are written atomically, and append-only JSON lines."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import IO, Any

from eagle31.errors import UserError

_RESTORE = "restore it; what a run has written can be deleted, and the run writes it again"


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old content or the new one.

    Raises:
        UserError: there is a directory of that name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except IsADirectoryError:
        raise _is_directory(path) from None


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that takes the place of `path` once it is on disk; an error leaves nothing of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # Otherwise the name may outlast a power failure, and the content not.
        os.replace(partial, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names no file
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically. Paths become strings, enums their values; other types raise TypeError."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=_encode) + "\n")


def file_within(directory: Path, name: object, where: Path) -> Path:
    """Return the path of a file that another file names, which has to be inside the directory.

    Args:
        name: as the file has it, relative to the directory.
        where: the file that has the name, for the message.

    Raises:
        UserError: it is no relative path, or leaves the directory.
    """
    if isinstance(name, str) and name and "\0" not in name:
        relative = PurePosixPath(name)
        if relative.parts and not relative.is_absolute() and ".." not in relative.parts:
            return directory / relative
    remedy = f"It names {name!r}, which is no file inside {directory}; download or write it again."
    raise UserError("file", where, remedy)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: it is a directory, or it is not JSON; names file and line.
        OSError: it cannot be opened.
    """
    try:
        return _parsed(path, 1, Path(path).read_text(encoding="utf-8"))
    except IsADirectoryError:
        raise _is_directory(path) from None
    except UnicodeDecodeError as error:
        raise _broken(path, 1, str(error)) from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises what `read_json` does, and UserError for another type."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise _broken(path, 1, f"an object is expected, and it is {type(content).__name__}")
    return content


@contextmanager
def expecting(path: Path, what: str) -> Iterator[None]:
    """Name a file that is JSON and does not have what the code inside reads from it.

    Args:
        what: what the file should be, for the message.

    Raises:
        UserError: the code inside raised an error of a missing key, or of a value of another type.
    """
    try:
        yield
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        remedy = f"It is not {what} ({error!r}); {_RESTORE}."
        raise UserError("file", path, remedy) from error


def append_jsonl(path: Path, record: dict[str, Any]) -> None:
    """Append one line in a single write, so that only the last line of a killed process can be incomplete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = _line(record).encode()
    with open(path, "ab", buffering=0) as file:
        file.write(line)


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write all records atomically, one per line."""
    write_text(path, "".join(_line(record) for record in records))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a JSON lines file, without a last line that has no newline: its process was killed.

    Raises:
        UserError: it is a directory, or another line is no JSON object; names file and line.
        OSError: it cannot be opened.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    except IsADirectoryError:
        raise _is_directory(path) from None
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # the last element is empty or an incomplete line
        record = _parsed(path, number, line)
        if not isinstance(record, dict):
            raise _broken(path, number, f"an object is expected, and it is {type(record).__name__}")
        records.append(record)
    return records


def _parsed(path: Path, first_line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _broken(path, first_line + error.lineno - 1, error.msg) from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or deep nesting
        raise _broken(path, first_line, str(error)) from error


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, default=_encode) + "\n"


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _broken(path: Path, line: int, reason: str) -> UserError:
    return UserError(
        "file",
        f"{path}:{line}",
        f"This is not JSON ({reason}); correct it, or {_RESTORE}.",
    )


def _is_directory(path: Path) -> UserError:
    return UserError("file", path, "It is a directory where a file belongs; move it elsewhere.")
