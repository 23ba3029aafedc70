"""The memory check: what does not fit GPU memory or disk, and which change makes it fit."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from train.config.capture import CaptureMode, CaptureSource, TransportKind
from train.config.run import RunConfig
from train.planning.memory import USABLE_FRACTION, TrainerMemory, TrainerSettings, changes
from train.planning.target_gpus import TargetOnGpus
from train.planning.work import WorkPlan

# In addition to its weights an engine needs room for a few sequences' keys and values and a forward pass.
TARGET_ROOM = 0.15
TRAINING = "training"  # the part of a run
_SPOOL = Path("/dev/shm")


@dataclass(frozen=True)
class Shortage:
    """A part of the run that needs more memory or disk space than there is."""

    what: str
    needed_bytes: int
    available_bytes: int
    change: str

    def __str__(self) -> str:
        needed, available = gigabytes(self.needed_bytes), gigabytes(self.available_bytes)
        return f"{self.what} needs {needed}, {available} are available. {self.change}"


def memory_check(
    config: RunConfig,
    settings: TrainerSettings,
    memory_of: Callable[[TrainerSettings], TrainerMemory],
    target: TargetOnGpus,
    gpu_bytes: int,
) -> list[Shortage]:
    """Return what does not fit a GPU. A target in vLLM has been checked where its servers were placed.

    Args:
        memory_of: returns a training GPU's memory under other settings.
        gpu_bytes: memory of one GPU.
    """
    found = []
    in_vllm = config.capture.source is CaptureSource.vllm
    if not in_vllm:
        found = _target(config, target, int(gpu_bytes * (1 - TARGET_ROOM)))
    shares_gpus = config.capture.source is CaptureSource.hf and config.capture.mode is CaptureMode.online
    held = target.bytes_per_gpu if shares_gpus else 0
    return _trainer(settings, memory_of, int(gpu_bytes * USABLE_FRACTION) - held) + found


def _trainer(
    settings: TrainerSettings, memory_of: Callable[[TrainerSettings], TrainerMemory], available: int
) -> list[Shortage]:
    needed = memory_of(settings).total
    if needed <= available:
        return []
    made = changes(settings)
    for index, (_, changed) in enumerate(made):
        if memory_of(changed).total <= available:
            chosen = _smallest_change(made[: index + 1], settings, memory_of, available)
            return [Shortage(TRAINING, needed, available, chosen)]
    smallest = memory_of(made[-1][1]).total if made else needed
    change = f"No setting is enough, the best needs {gigabytes(smallest)}: lower drafter.draft_vocab_size."
    return [Shortage(TRAINING, needed, available, change)]


def _smallest_change(
    made: list[tuple[str, TrainerSettings]],
    settings: TrainerSettings,
    memory_of: Callable[[TrainerSettings], TrainerMemory],
    available: int,
) -> str:
    """Return the last change alone if that is enough, else all of them."""
    text, changed = made[-1]
    differing = {
        k: v for k, v in vars(changed).items() if v != getattr(made[-2][1] if len(made) > 1 else settings, k)
    }
    alone = replace(settings, **differing)
    if memory_of(alone).total <= available:
        return f"Set {text} ({gigabytes(memory_of(alone).total)})."
    return f"Set {' '.join(one for one, _ in made)} ({gigabytes(memory_of(changed).total)})."


def _target(config: RunConfig, target: TargetOnGpus, available: int) -> list[Shortage]:
    if target.bytes_per_gpu <= available:
        return []
    gpus = math.ceil(target.bytes_per_gpu * target.gpus_per_replica / available)
    gpus = 1 << (gpus - 1).bit_length()  # heads are split evenly
    engine = f"capture={'vllm' if config.capture.mode is CaptureMode.offline else 'vllm_online'}"
    change = (
        f"Set target.device_map=auto over {gpus} GPUs, or {engine} "
        f"vllm.engine_args.tensor_parallel_size={gpus}."
    )
    return [Shortage("the target", target.bytes_per_gpu, available, change)]


def disk_check(config: RunConfig, work: WorkPlan) -> list[Shortage]:
    """Return what does not fit this machine's disk or the memory in which the spool is."""
    if work.store_bytes is None:
        return []
    capture = config.capture
    if capture.mode is CaptureMode.offline:
        free = _free(Path(config.output_dir))
        change = "Set capture.mode=online, which needs no disk"
        if capture.codec != "fp8":
            change += "; or capture.codec=fp8, which halves it"
        change += f"; or {work.store_bytes / max(free, 1):.1f} times fewer capture.max_samples."
        return [] if work.store_bytes <= free else [Shortage("the store", work.store_bytes, free, change)]
    if capture.transport is TransportKind.mooncake:
        return []
    base = _SPOOL if capture.spool_dir is None else Path(capture.spool_dir)
    free = _free(base)
    change = f"Set capture.spool_gb={max(1, int(free * 0.8 / 1e9))}, or capture.spool_dir on a larger disk."
    return [] if work.store_bytes <= free else [Shortage("the spool", work.store_bytes, free, change)]


def _free(path: Path) -> int:
    """Return the free bytes of the disk on which the directory is or will be."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def rounded(count: float, digits: int) -> str:
    """Format a count with `digits` significant digits in thousands (K), millions (M) or billions (B)."""
    for factor, unit in ((1e9, "B"), (1e6, "M")):
        if count >= factor:
            return f"{count / factor:,.{digits}g} {unit}"
    return f"{count / 1e3:.{digits}g} K"


def gigabytes(count: float) -> str:
    """Format bytes with three significant digits in MB, GB or TB (10^6, 10^9, 10^12 bytes)."""
    if count >= 1e12:
        return f"{count / 1e12:.3g} TB"
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
