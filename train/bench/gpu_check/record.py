"""What a part of the check finds: figures, comparisons with a bound, and the reason where it does not run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle31.json_files import read_json, write_json


class NotRun(Exception):
    """A part cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Options:
    """What all parts of one check share.

    Args:
        directory: where the parts leave their runs; later parts read those of earlier ones.
        dry_run: run everything at a small size, on whatever device there is.
        num_gpus: the number of GPUs of this machine.
    """

    directory: Path
    dry_run: bool
    num_gpus: int

    @property
    def device_type(self) -> str:
        return "cuda" if self.num_gpus else "cpu"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"directory": str(self.directory)}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> "Options":
        return Options(Path(raw["directory"]), raw["dry_run"], raw["num_gpus"])


@dataclass
class Findings:
    """The content of a part's file."""

    figures: list[dict[str, Any]] = field(default_factory=list)  # name, value, unit
    checks: list[dict[str, Any]] = field(default_factory=list)  # what, passed, detail
    error: str | None = None
    not_run: str | None = None
    finished: bool = False


class Record:
    """The findings of one part. Each is written at once, so that a part that is ended keeps them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._findings = Findings()
        self._write()

    def figure(self, name: str, value: float | str, unit: str = "") -> None:
        """Add a measured value."""
        self._findings.figures.append({"name": name, "value": value, "unit": unit})
        self._write()

    def check(self, what: str, passed: bool, detail: str) -> None:
        """Add a comparison; the part fails if one of them has not passed."""
        self._findings.checks.append({"what": what, "passed": bool(passed), "detail": detail})
        self._write()

    def fail(self, error: str) -> None:
        self._findings.error = error
        self._write()

    def leave_out(self, reason: str) -> None:
        self._findings.not_run = reason
        self._write()

    def finish(self) -> None:
        self._findings.finished = True
        self._write()

    def _write(self) -> None:
        write_json(self._path, asdict(self._findings))


def read_findings(path: Path) -> Findings:
    """Return what a part has written; nothing if it never started."""
    return Findings(**read_json(path)) if path.exists() else Findings()
