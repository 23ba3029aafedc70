"""JSON and text files that are written atomically, and append-only JSON lines."""

import json
import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

from eagle31.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old content or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically. Paths become strings, enums their values; other types raise TypeError."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=_encode) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError with file and line if it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise _broken(path, error.lineno, error.msg) from error
    except UnicodeDecodeError as error:
        raise _broken(path, 1, str(error)) from error


def append_jsonl(path: Path, record: dict[str, Any]) -> None:
    """Append one line in a single write, so that only the last line of a killed process can be incomplete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = _line(record).encode()
    with open(path, "ab", buffering=0) as file:
        file.write(line)


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write all records atomically, one per line."""
    write_text(path, "".join(_line(record) for record in records))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a JSON lines file, without a last line that has no newline: its process was killed.

    Raises UserError with the line number for any other line that is not JSON.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # the last element is empty or an incomplete line
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise _broken(path, number, error.msg) from error
    return records


def _line(record: dict[str, Any]) -> str:
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
        f"This is not JSON ({reason}); correct it, or delete the file to have it written again.",
    )
