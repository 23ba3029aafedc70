"""Stage results: directories named by the fingerprint of what they depend on, finished once recorded."""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle31.json_files import read_json, write_json

RECORD = "stage.json"


def fingerprint(inputs: dict[str, Any]) -> str:
    """12 hexadecimal digits over the canonical JSON of `inputs`."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Artifact:
    """Where one stage's result lies, finished or not."""

    stage: str
    inputs: dict[str, Any]
    directory: Path

    @staticmethod
    def locate(output_dir: Path, stage: str, inputs: dict[str, Any]) -> "Artifact":
        return Artifact(stage, inputs, output_dir / f"{stage}-{fingerprint(inputs)}")

    @property
    def record_path(self) -> Path:
        return self.directory / RECORD

    @property
    def finished(self) -> bool:
        return self.record_path.exists()

    @property
    def record(self) -> dict[str, Any]:
        return read_json(self.record_path)

    @property
    def key(self) -> str:
        """What a later stage depends on."""
        return self.directory.name

    def finish(self, seconds: float, facts: dict[str, Any]) -> None:
        """Marks the result complete; nothing in the directory counts before."""
        record = {
            "stage": self.stage,
            "inputs": self.inputs,
            "facts": facts,
            "seconds": round(seconds, 3),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(self.record_path, record)

    def reopen(self) -> None:
        """Part of the result is lost: the next run makes what is missing of it."""
        self.record_path.unlink(missing_ok=True)
