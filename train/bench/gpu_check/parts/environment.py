"""The machine, and the packages that the other parts need."""

import os
import platform

import torch

from train.bench.gpu_check.record import Options, Record
from train.versions import (
    PACKAGES,
    git_revision,
    missing_packages,
    package_versions,
)


def run(options: Options, record: Record) -> None:
    """Record GPUs, versions, and which packages are missing."""
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        record.figure(
            f"GPU {index}",
            f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB, compute capability {gpu.major}.{gpu.minor}",
        )
    record.figure("CUDA of torch", str(torch.version.cuda))
    record.figure("processor", f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    record.figure("Python", platform.python_version())
    record.figure("revision", git_revision() or "unknown")
    installed = package_versions()
    for name in PACKAGES:
        record.figure(name, installed.get(name, "missing"))
    missing = missing_packages()
    remedy = f"missing: {', '.join(missing)}; give their wheels with --wheels" if missing else "all are there"
    record.check("the packages that a run needs are installed", not missing, remedy)
    record.figure("vLLM", vllm_version())


def vllm_version() -> str:
    """Return the version of vLLM in its environment, or why there is none."""
    from data.vllm.environment import find_python, installed_version
    from eagle31.errors import UserError

    try:
        python = find_python()
    except UserError as error:
        return f"not installed: {error}"
    return installed_version(python) or f"in {python}"
