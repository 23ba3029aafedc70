"""The environment in which a process's threads start. It has to be set before torch is imported."""

import os
import shutil
from collections.abc import MutableMapping


def set_thread_defaults(environment: MutableMapping[str, str], num_cores: int, has_gpu: bool) -> None:
    """Set what the user left open; what is set already stays.

    Args:
        environment: os.environ of a process that has not imported torch.
        num_cores: how many cores the process may run on.
        has_gpu: whether the machine has a GPU.
    """
    # OpenMP's threads spin by default while they wait, which delays everything else on the same cores: a
    # decoding step of a small model takes 25 times as long when two busy processes share two cores.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # For several processes on a node torchrun sets OMP_NUM_THREADS=1 itself and leaves no mark. A user's 1
    # looks the same, so it stays: one thread is enough on GPUs, and on the CPU the user can set it.
    num_processes = int(environment.get("LOCAL_WORLD_SIZE", 1))
    environment.setdefault("OMP_NUM_THREADS", str(max(num_cores // num_processes, 1)))
    if not has_gpu:
        environment.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns when it has to find out


def set_own_thread_defaults() -> None:
    """Set the defaults of this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    set_thread_defaults(os.environ, cores, has_gpu=shutil.which("nvidia-smi") is not None)
