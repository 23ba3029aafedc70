"""The space on disks and the host memory that a run still needs, and what there is."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from data.capture.transport.spool import MEMORY
from data.target.checkpoint import is_hub_id
from train.artifact import MANIFEST, artifacts_dir
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import Stage, states_directory, waiting_bytes
from train.config.target import EMBEDDED
from train.plan.cluster import Cluster
from train.plan.earlier import made_with
from train.plan.sizes import RunSizes, trainer_settings
from train.plan.work import Work
from train.tables import gigabytes

_DOWNLOADED = 0.1  # of a model's size: what may be missing where it counts as complete
_STATES = 3  # float32 weights and two moments
# Of a process on a CPU: Python, libraries, and what malloc keeps of freed tensors. Measured.
_PROCESS_BYTES = 900_000_000


@dataclass(frozen=True)
class Use:
    """What a run has yet to write below a directory, or keeps in a node's memory."""

    what: str
    num_bytes: int
    remedy: str


@dataclass(frozen=True)
class Room:
    """A disk, or the memory of a node, and what the run needs of it."""

    where: str
    num_bytes: int  # that are free, on a disk
    uses: list[Use]

    @property
    def remedy(self) -> str:
        """What to do about the largest use; empty where all has room."""
        if sum(use.num_bytes for use in self.uses) <= self.num_bytes:
            return ""
        return max(self.uses, key=lambda use: use.num_bytes).remedy

    def __str__(self) -> str:
        parts = ", ".join(f"{use.what} {gigabytes(use.num_bytes)}" for use in self.uses)
        return f"{self.where} has {gigabytes(self.num_bytes)} for {parts}"


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk on which the directory is or will be."""
    return shutil.disk_usage(existing(path)).free


def existing(path: Path) -> Path:
    """Return the path, or the nearest of its parents that exists."""
    path = path.expanduser().absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def disks(sizes: RunSizes, work: Work) -> list[Room]:
    """Return the disks that the run writes to."""
    found: dict[int, Room] = {}
    for directory, use in _uses(sizes, work):
        if use.num_bytes > 0:
            where = existing(directory)
            disk = found.setdefault(os.stat(where).st_dev, Room(str(where), free_bytes(where), []))
            disk.uses.append(use)
    return list(found.values())


def _uses(sizes: RunSizes, work: Work) -> Iterator[tuple[Path, Use]]:
    config = sizes.config
    capture, results = config.capture, artifacts_dir(config)
    made = made_with(config, Stage.capture)
    if not any((one / MANIFEST).exists() for one in made):
        size, remedy = work.held_out_bytes, "Lower data.num_validation and data.num_test"
        if capture.mode is CaptureMode.offline:
            size += work.store_bytes or 0
            smaller = "" if capture.codec == "fp8" else "capture.codec=fp8, "
            remedy = f"Set {smaller}capture.mode=online or a lower data.max_samples"
        yield results, Use("the store", size - _bytes_of(made), f"{remedy}, or free some space.")
    # One checkpoint more than are kept, and three copies of the weights.
    kept = 4 * sizes.num_parameters * (_STATES * (config.train.keep_checkpoints + 1) + 3)
    remedy = "Lower train.keep_checkpoints, or free some space."
    left = kept - _bytes_of(made_with(config, Stage.train) + made_with(config, Stage.export))
    yield results, Use("checkpoints and export", left, remedy)
    remedy = "Set HF_HOME to a directory on a larger disk."
    yield Path(constants.HF_HUB_CACHE), Use("the target's weights", download_bytes(sizes), remedy)
    if (spool := states_directory(config)) is not None:
        remedy = "Lower capture.spool_gb, set capture.spool_dir, or enlarge /dev/shm (Docker: --shm-size)."
        yield spool, Use("the spool", waiting_bytes(config), remedy)


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


def _bytes_of(directories: Iterable[Path]) -> int:
    """Return the bytes of all files that an earlier run has left there."""
    return sum(
        os.lstat(os.path.join(root, name)).st_size
        for directory in directories
        for root, _, names in os.walk(directory)
        for name in names
    )


def host_memory(sizes: RunSizes, cluster: Cluster) -> Room:
    """Return the host memory of one node that trains, without the states of validation."""
    config, drafter, processes = sizes.config, sizes.drafter, cluster.processes_per_node
    settings, uses = trainer_settings(config, cluster.num_ranks), []
    if states_directory(config) == MEMORY:
        uses.append(Use("the spool", waiting_bytes(config), "Lower capture.spool_gb."))
    shorter = "Lower train.row_tokens and data.max_tokens, or start fewer processes."
    if not cluster.gpus_per_node:
        size = sizes.trainer(cluster.num_ranks, "cpu").total + _PROCESS_BYTES
        training = Use("training", processes * size, shorter)
        in_processes, online = (
            config.capture.source is CaptureSource.hf,
            config.capture.mode is CaptureMode.online,
        )
        copies = processes if in_processes else int(not config.vllm.servers)
        remedy = "Set capture=hf" if online else "Use a machine with more memory"
        target = Use(
            "the target", copies * sizes.target.checkpoint_bytes, f"{remedy}, or start fewer processes."
        )
        # Offline the target has ended before training starts.
        uses += [training, target] if online else [max(training, target, key=lambda use: use.num_bytes)]
    elif config.deepspeed.offload_optimizer:
        size = 4 * _STATES * sizes.num_parameters // cluster.num_nodes
        uses.append(Use("the optimizer", size, "Set deepspeed.offload_optimizer=false."))
    if cluster.gpus_per_node and config.train.rollout_chunk is not None:
        # Rows that are rolled out in chunks stay there: the one at work and the next.
        width = (len(drafter.aux_layer_ids) + 1) * drafter.target_hidden_size
        size = 2 * processes * settings.row_tokens * width * settings.itemsize
        uses.append(Use("states of rows", size, shorter))
    return Room("the host memory of a node", host_bytes(), uses)


def host_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # there is no limit
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
