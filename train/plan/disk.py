"""The disk space that a run still needs, and the space that there is."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from data.target.checkpoint import is_hub_id
from eagle31.json_files import read_json
from train.config.capture import CaptureMode
from train.config.run import RunConfig
from train.config.target import EMBEDDED
from train.plan.sizes import RunSizes
from train.plan.where import where_target_runs
from train.plan.work import Work
from train.tables import gigabytes

_DOWNLOADED = 0.1  # of a model's size: what may be missing where it counts as complete
_STATES = 3  # float32 weights and two moments


@dataclass(frozen=True)
class DiskUse:
    """What a run has yet to write below a directory."""

    what: str
    directory: Path
    num_bytes: int
    remedy: str


@dataclass(frozen=True)
class Disk:
    """One disk, and what the run has yet to write there."""

    directory: Path  # one that exists
    free_bytes: int
    uses: list[DiskUse]

    @property
    def needed_bytes(self) -> int:
        return sum(use.num_bytes for use in self.uses)

    @property
    def remedy(self) -> str:
        """What to do about the largest use; empty where all has room."""
        if self.needed_bytes <= self.free_bytes:
            return ""
        return max(self.uses, key=lambda use: use.num_bytes).remedy

    def __str__(self) -> str:
        parts = ", ".join(f"{use.what} {gigabytes(use.num_bytes)}" for use in self.uses)
        return f"{self.directory} has {gigabytes(self.free_bytes)} free for {parts}"


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk on which the directory is or will be."""
    return shutil.disk_usage(existing(path)).free


def existing(path: Path) -> Path:
    """Return the path, or the nearest of its parents that exists."""
    path = path.expanduser().absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def disks(sizes: RunSizes, work: Work) -> list[Disk]:
    """Return the disks that the run writes to."""
    found: dict[int, Disk] = {}
    for use in _uses(sizes, work):
        if use.num_bytes > 0:
            where = existing(use.directory)
            disk = found.setdefault(os.stat(where).st_dev, Disk(where, free_bytes(where), []))
            disk.uses.append(use)
    return list(found.values())


def _uses(sizes: RunSizes, work: Work) -> Iterator[DiskUse]:
    config = sizes.config
    capture, output_dir = config.capture, Path(config.output_dir)
    if capture.mode is CaptureMode.offline and work.store_bytes:
        left = 0 if _has_store(config) else work.store_bytes - _bytes_below(output_dir, "artifacts/capture-*")
        smaller = "" if capture.codec == "fp8" else "capture.codec=fp8, "
        remedy = f"Set {smaller}capture.mode=online or a lower capture.max_samples, or free some space."
        yield DiskUse("the store", output_dir, left, remedy)
    # One checkpoint more than are kept, and three copies of the weights.
    kept = 4 * sizes.num_parameters * (_STATES * (config.train.keep_checkpoints + 1) + 3)
    remedy = "Lower train.keep_checkpoints, or free some space."
    left = kept - _bytes_below(output_dir, "artifacts/train-*", "artifacts/export-*")
    yield DiskUse("checkpoints and export", output_dir, left, remedy)
    remedy = "Set HF_HOME to a directory on a larger disk."
    yield DiskUse("the target's weights", Path(constants.HF_HUB_CACHE), download_bytes(sizes), remedy)
    target = where_target_runs(sizes)
    if target.spool_dir is not None:
        remedy = "Lower capture.spool_gb, set capture.spool_dir, or enlarge /dev/shm (Docker: --shm-size)."
        yield DiskUse("the spool", target.spool_dir, target.waiting_bytes, remedy)


def download_bytes(sizes: RunSizes) -> int:
    """Return the bytes of the target's weights that the Hub's cache lacks; 0 where nothing is missing."""
    model = sizes.config.target.model
    if model == EMBEDDED or Path(model).expanduser().is_dir() or not is_hub_id(model):
        return 0
    size = sizes.target.checkpoint_bytes
    missing = size - cached_repositories().get(("model", model), 0)
    return missing if missing > _DOWNLOADED * size else 0


def cached_repositories() -> dict[tuple[str, str], int]:
    """Return the bytes of each repository in the Hub's cache by kind ("model", "dataset") and id."""
    try:
        return {(one.repo_type, one.repo_id): one.size_on_disk for one in scan_cache_dir().repos}
    except (CacheNotFound, OSError):
        return {}


def _has_store(config: RunConfig) -> bool:
    """Return whether a store with as many samples and the same codec is finished in the output directory."""
    wanted = (config.capture.codec, config.capture.max_samples)
    manifests = Path(config.output_dir).glob("artifacts/capture-*/stage.json")
    found = (read_json(path)["inputs"] for path in manifests)
    return any((inputs["codec"], inputs.get("max_samples")) == wanted for inputs in found)


def _bytes_below(directory: Path, *patterns: str) -> int:
    """Return the bytes of files that an earlier run has left."""
    folders = (folder for pattern in patterns for folder in directory.glob(pattern))
    paths = (
        os.path.join(root, name) for folder in folders for root, _, names in os.walk(folder) for name in names
    )
    return sum(os.lstat(path).st_size for path in paths)
