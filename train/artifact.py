"""Stage results: directories named by a fingerprint of what they depend on."""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle31.json_files import read_json, write_json

MANIFEST = "stage.json"


def fingerprint(inputs: dict[str, Any]) -> str:
    """Return 12 hexadecimal digits over the canonical JSON of `inputs`."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Artifact:
    """The directory of one stage's result, which is finished once it has a manifest."""

    stage: str
    inputs: dict[str, Any]  # everything that the result depends on
    directory: Path

    @staticmethod
    def locate(output_dir: Path, stage: str, inputs: dict[str, Any]) -> "Artifact":
        return Artifact(stage, inputs, output_dir / f"{stage}-{fingerprint(inputs)}")

    @property
    def manifest_path(self) -> Path:
        return self.directory / MANIFEST

    @property
    def finished(self) -> bool:
        return self.manifest_path.exists()

    @property
    def manifest(self) -> dict[str, Any]:
        return read_json(self.manifest_path)

    @property
    def summary(self) -> dict[str, Any]:
        """What the stage returned when it finished: counts and other numbers, called facts in stage.json."""
        return self.manifest["facts"]

    @property
    def key(self) -> str:
        """The name by which later stages include this result in their inputs."""
        return self.directory.name

    def finish(self, seconds: float, summary: dict[str, Any]) -> None:
        """Write the manifest, which marks the result as complete."""
        manifest = {
            "stage": self.stage,
            "inputs": self.inputs,
            "facts": summary,
            "seconds": round(seconds, 3),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(self.manifest_path, manifest)

    def reopen(self) -> None:
        """Mark the result as unfinished, so that the next run makes the part that is lost."""
        self.manifest_path.unlink(missing_ok=True)


def has_trained(output_dir: Path) -> bool:
    """Whether a training in this output directory has a checkpoint, which the same command resumes."""
    return any(output_dir.glob("artifacts/train-*/checkpoints/step-*"))
