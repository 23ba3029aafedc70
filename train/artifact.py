"""Results of stages, named by a fingerprint of their inputs, and the output directories of runs."""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk

from data.locks import holder, lock, try_lock
from eagle31.errors import UserError
from eagle31.json_files import read_json_object, write_json
from train.config.run import RunConfig, Stage

MANIFEST = "stage.json"
EXPORT, TRAINING = "export", "training"  # links in the output directory
_LOCK_FILE = ".lock"  # in the output directory
_STARTED = "started.json"  # when an unfinished stage was started, and how long its earlier starts took
# How this project, and how safetensors, names what is being written.
_LEFTOVER = re.compile(r"\..+\.partial|\.tmp\w{6}")
# Whoever writes a store looks after its leftovers.
_OF_WRITERS = re.compile(r"\.shard-.*")
_REFUSED = "refused"
_ARTIFACTS = "artifacts"  # in an output directory, unless the settings name another


def fingerprint(inputs: dict[str, Any]) -> str:
    """Return 12 hexadecimal digits over the canonical JSON of `inputs`."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def dotted(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is no mapping by its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class Artifact:
    """The directory of one stage's result, which is finished once it has a manifest."""

    stage: str
    inputs: dict[str, Any]  # everything that the result depends on
    directory: Path

    @staticmethod
    def locate(directory: Path, stage: str, inputs: dict[str, Any]) -> "Artifact":
        inputs = json.loads(json.dumps(inputs, default=str))  # as its manifest has them
        return Artifact(stage, inputs, directory / f"{stage}-{fingerprint(inputs)}")

    @property
    def manifest_path(self) -> Path:
        return self.directory / MANIFEST

    @property
    def finished(self) -> bool:
        return self.manifest_path.exists()

    @property
    def manifest(self) -> dict[str, Any]:
        """What `finish` wrote."""
        with _reading(self.manifest_path, remove=self.manifest_path):
            content = read_json_object(self.manifest_path)
            _ = content["summary"].keys(), content["seconds"]
            return content

    @property
    def summary(self) -> dict[str, Any]:
        """What the stage returned when it finished: counts and other numbers."""
        return self.manifest["summary"]

    def read(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file of the result. Raise UserError if it is damaged."""
        with _reading(path := self.directory / name, remove=self.directory):
            return read_json_object(path)

    def dataset(self, name: str) -> Dataset:
        """Return a dataset of the result. Raise UserError if it is damaged."""
        with _reading(path := self.directory / name, remove=self.directory):
            return load_from_disk(str(path))

    @property
    def key(self) -> str:
        """The name by which later stages include this result in their inputs."""
        return self.directory.name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs from making this result; wait for one that is making it."""
        path = _lock_of(self.directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        taken = try_lock(path)
        if taken is None:
            print(f"{self.stage}: waits for {holder(path)}, which makes {self.directory}", flush=True)
            taken = lock(path)
        with taken:
            yield

    def begin(self) -> float:
        """Begin a start; return the seconds of the killed ones before, each up to its last written file."""
        path, before = self.directory / _STARTED, 0.0
        if path.exists():
            with _reading(path, remove=path):
                earlier = read_json_object(path)
                before = earlier["before"] - earlier["at"]
            before += max(map(_written_at, self.directory.rglob("*")))
        write_json(path, {"before": before, "at": time.time()})
        return before

    def finish(self, seconds: float, summary: dict[str, Any]) -> None:
        """Write the manifest, which marks the result as complete; `seconds` are those of all starts."""
        manifest = {
            "stage": self.stage,
            "inputs": self.inputs,
            "summary": summary,
            "seconds": round(seconds, 3),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(self.manifest_path, manifest)
        (self.directory / _STARTED).unlink(missing_ok=True)

    def reopen(self) -> None:
        """Mark the result as unfinished, so that the next run makes the part that is lost."""
        self.manifest_path.unlink(missing_ok=True)


@contextmanager
def _reading(path: Path, remove: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into a UserError with what to remove."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.remedy.partition(";")[0] if isinstance(error, UserError) else error
        remedy = f"It is damaged ({reason}). Delete {remove}: the run's command makes it again."
        raise UserError("file", path, remedy) from error


@contextmanager
def exclusive(output_dir: Path) -> Iterator[None]:
    """Lock the output directory for this run until it ends.

    Raises:
        UserError: another run holds it.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    taken = try_lock(output_dir / _LOCK_FILE)
    if taken is None:
        who = holder(output_dir / _LOCK_FILE)
        remedy = f"Another run is using this directory: {who}. Wait for it or end it."
        raise UserError("output_dir", output_dir, remedy)
    with taken:
        yield


def link_result(output_dir: Path, name: str, result: Path) -> None:
    """Point a link in the output directory at a result, also where it points at another one."""
    partial = output_dir / f".{name}.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to(os.path.relpath(result, output_dir))
    os.replace(partial, output_dir / name)


def check_links(output_dir: Path, names: Iterable[str]) -> None:
    """Raise UserError where a link would replace something that no run has made."""
    for name in names:
        path = output_dir / name
        if path.exists() and not path.is_symlink():
            remedy = f"It is not the link that a run makes to its {name}; move it elsewhere."
            raise UserError("output_dir", path, remedy)


def has_trained(training: Path) -> bool:
    """Return whether a training has a checkpoint, which the same command resumes."""
    return any(training.glob("checkpoints/step-*"))


def artifacts_dir(config: RunConfig) -> Path:
    """Return the directory of the results: by default that of the training to continue, or the run's own."""
    if config.artifacts_dir is not None:
        return Path(config.artifacts_dir)
    if config.train.continue_from is not None:
        training = named_training(config.train.continue_from)[0] / TRAINING
        if training.exists():
            return training.resolve().parent
    return Path(config.output_dir) / _ARTIFACTS


def named_training(origin: str) -> tuple[Path, int | None]:
    """Return directory and step of `OUTPUT_DIR` or `OUTPUT_DIR@STEP`; None is the newest checkpoint."""
    directory, separator, step = origin.rpartition("@")
    named = separator and step.isdigit() and not Path(origin).exists()
    return Path(directory if named else origin).resolve(), int(step) if named else None


def remove_leftovers(directory: Path) -> None:
    """Remove unfinished files and directories, but not those of results below an output directory.

    None of them counts as a result, but a checkpoint or an export takes as much space as a finished one.
    Only the process that has the directory's lock may call this, before the run writes anything.
    """
    for entry in os.scandir(directory):
        path = Path(entry.path)
        if _LEFTOVER.fullmatch(entry.name) and not _OF_WRITERS.fullmatch(entry.name):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        elif entry.is_dir(follow_symlinks=False) and entry.name not in (_REFUSED, _ARTIFACTS):
            remove_leftovers(path)


def remove_leftovers_of_results(results: Path) -> None:
    """Remove what killed runs have left of results, apart from those that another run is making."""
    for path in [path for stage in Stage for path in results.glob(f"{stage.value}-*")]:
        if taken := try_lock(_lock_of(path)):
            with taken:
                remove_leftovers(path)


def _lock_of(result: Path) -> Path:
    return result.with_name(f".{result.name}.lock")


def _written_at(path: Path) -> float:
    """Return when a file was last written; 0 for directories, whose times change at each start."""
    try:
        return path.stat().st_mtime if path.is_file() else 0.0
    except FileNotFoundError:  # another rank has just removed it
        return 0.0
