"""Results of an evaluation's passes on disk, so that a pass that fails costs no other."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle31.decoding.speculative import Decoded
from eagle31.json_files import read_json, write_json


class PassResults:
    """A directory with one JSON file for each finished pass, which a later evaluation reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a pass: the one on disk, or else the computed one, once it is on disk."""
        path = self.directory / f"{name}.json"
        if path.exists():
            print(f"evaluate: {name} is finished already", flush=True)
            return read_json(path)
        result = compute()
        write_json(path, result)
        return result

    def decoded(self, name: str, compute: Callable[[], list[Decoded]]) -> list[Decoded]:
        """Return the completions of a pass, as `run` does."""
        result = self.run(name, lambda: {"completions": [asdict(one) for one in compute()]})
        return [Decoded(**one) for one in result["completions"]]
