"""Results of an evaluation's passes on disk, so that a pass that fails costs no other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle31.errors import UserError
from eagle31.json_files import read_sealed_json, write_sealed_json


class PassResults:
    """A directory with one JSON file for each finished pass, which a later evaluation reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def run(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a pass: the one on disk, or else the computed one, once it is on disk.

        A damaged result is computed again.
        """
        path = self._path(name)
        try:
            return read_sealed_json(path)
        except FileNotFoundError:
            pass
        except UserError:
            if path.is_dir():
                raise
        write_sealed_json(path, compute())
        return read_sealed_json(path)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"
