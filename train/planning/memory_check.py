"""The memory check: what does not fit GPU memory or disk, and which change makes it fit."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from train.config.capture import CaptureMode, CaptureSource, TransportKind
from train.config.run import RunConfig
from train.planning.memory import USABLE_FRACTION, TrainerMemory, TrainerSettings, changes
from train.planning.target import TargetPlan, shares_gpus
from train.planning.work import WorkPlan

# In addition to its weights an engine needs room for a few sequences' keys and values and a forward pass.
TARGET_ROOM = 0.15
_SPOOL = Path("/dev/shm")


@dataclass(frozen=True)
class Shortage:
    """A part of the run that needs more memory or disk space than there is."""

    what: str
    needed_bytes: int
    available_bytes: int
    change: str


def memory_check(
    config: RunConfig,
    settings: TrainerSettings,
    memory_of: Callable[[TrainerSettings], TrainerMemory],
    target: TargetPlan,
    work: WorkPlan,
    gpu_bytes: int | None,
    here: bool,
) -> list[Shortage]:
    """Return everything that does not fit.

    Args:
        memory_of: returns a training GPU's memory under other settings.
        gpu_bytes: memory of one GPU; None leaves GPUs out of the check.
        here: whether the run is for this machine, so that its disks are checked.
    """
    found = []
    if gpu_bytes is not None:
        shared = target.bytes_per_gpu if shares_gpus(config) else 0
        found += _trainer(settings, memory_of, int(gpu_bytes * USABLE_FRACTION) - shared)
        found += _target(config, target, int(gpu_bytes * (1 - TARGET_ROOM)))
    return found + (_disk(config, work) if here else [])


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
            return [Shortage("training", needed, available, chosen)]
    smallest = memory_of(made[-1][1]).total if made else needed
    change = f"No setting is enough, the best needs {gigabytes(smallest)}: lower drafter.draft_vocab_size."
    return [Shortage("training", needed, available, change)]


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


def _target(config: RunConfig, target: TargetPlan, available: int) -> list[Shortage]:
    if target.bytes_per_gpu <= available:
        return []
    gpus = math.ceil(target.checkpoint_bytes / available)
    gpus = 1 << (gpus - 1).bit_length()  # heads are split evenly
    if config.capture.source is CaptureSource.hf:
        change = f"Set target.device_map=auto over {gpus} GPUs, or capture=vllm with as many."
    elif config.capture.source is CaptureSource.vllm:
        change = f"Set vllm.engine_args.tensor_parallel_size={gpus}"
        if gpus > 8:
            change += " over several nodes; vLLM cannot capture with pipeline parallelism."
    else:
        change = f"Set plan.target_gpus={gpus}, and give TorchSpec as many."
    return [Shortage("the target", target.bytes_per_gpu, available, change)]


def _disk(config: RunConfig, work: WorkPlan) -> list[Shortage]:
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
