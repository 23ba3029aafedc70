"""A check of the machine, and the table of several.

This module imports the standard library alone, so that it works where the environment does not.
"""

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import zip_longest
from typing import Any

from eagle31.errors import UserError

_HEADER = ("", "check", "found", "needed", "remedy")
_WIDEST = (7, 34, 40, 34)  # characters of the columns before the last
_NARROWEST = 12  # a column that is broken into lines
_SHARE = 0.3  # of the line, at most, for each of the columns `found` and `needed`
_GAP = "  "
_LINE_WIDTH = 150  # where no terminal says otherwise


class Status(Enum):
    ok = "ok"
    warning = "warning"  # the run can start; it may be slow, or fail later
    lacking = "lacking"  # the run cannot start, or cannot end


@dataclass(frozen=True)
class Check:
    """What a check found.

    Args:
        name: what was looked at.
        found, needed: in words.
        remedy: what to do, in full sentences; empty where nothing is to be done.
        field: the setting or variable that the check is about, for an error message.
        value: its value.
    """

    name: str
    status: Status
    found: str
    needed: str = ""
    remedy: str = ""
    field: str = ""
    value: Any = None

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name not in ("field", "value")}
        return values | {"status": self.status.value}


def ok(name: str, found: str, needed: str = "") -> Check:
    """Return a check that found what is needed."""
    return Check(name, Status.ok, found, needed)


def judged(
    name: str,
    good: bool,
    found: str,
    needed: str,
    remedy: str,
    *,
    otherwise: Status = Status.lacking,
    field: str = "",
    value: Any = None,
) -> Check:
    """Return a check whose remedy counts only where it is not good; `otherwise` is its status then."""
    if good:
        return Check(name, Status.ok, found, needed, field=field, value=value)
    return Check(name, otherwise, found, needed, remedy, field, value)


def refusal(name: str, needed: str, error: UserError, found: str | None = None) -> Check:
    """Return a check that lacks what an error says: the run would end with the same message.

    Args:
        found: in words; None: the value of the error.
    """
    shown = str(error.value) if found is None else found
    return Check(name, Status.lacking, shown, needed, error.remedy, error.field, error.value)


def asked(name: str, question: Callable[[], object], found: str, needed: str) -> Check:
    """Return a check that asks as the run does, which raises UserError where it cannot start.

    Args:
        found: in words, where nothing is raised.
    """
    try:
        question()
    except UserError as error:
        return refusal(name, needed, error)
    return ok(name, found, needed)


def lacks(checks: Iterable[Check]) -> list[Check]:
    """Return the checks without which a run cannot start."""
    return [check for check in checks if check.status is Status.lacking]


def refuse_lacking(checks: Iterable[Check]) -> None:
    """Raise UserError for the first check without which a run cannot start."""
    for check in checks:
        if check.status is Status.lacking:
            raise UserError(check.field or check.name, check.value or check.found, check.remedy)


def table(checks: Sequence[Check], width: int | None = None) -> list[str]:
    """Return a table as lines, with cells that are broken into several lines where they are long.

    Args:
        width: characters of a line; None: those of the terminal.
    """
    rows = [_HEADER] + [(one.status.value, one.name, one.found, one.needed, one.remedy) for one in checks]
    widths = [min(max(len(row[column]) for row in rows), widest) for column, widest in enumerate(_WIDEST)]
    line_width = width or shutil.get_terminal_size((_LINE_WIDTH, 24)).columns
    room = line_width - widths[0] - widths[1] - len(_GAP) * len(widths)
    for column in (2, 3):
        widths[column] = max(_NARROWEST, min(widths[column], int(_SHARE * room)))
    widths.append(max(_NARROWEST, room - widths[2] - widths[3]))
    lines = []
    for row in rows:
        cells = [_wrapped(text, size) for text, size in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(size) for part, size in zip(parts, widths, strict=True))
            lines.append(_GAP.join(padded).rstrip())
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    # Commands, paths and sizes stay in one piece where they fit a line.
    joined = re.sub(r"(\d) ([MGT]B)", "\\1\N{NO-BREAK SPACE}\\2", text)
    lines = textwrap.wrap(joined, width, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines] or [""]
