"""The machine, and the packages that the other parts need."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from train.bench.gpu_check.record import Options, Record
from train.versions import PACKAGES, git_revision, package_versions, untested_packages

ROOT = Path(__file__).resolve().parents[4]


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
    for note in untested_packages(installed):
        record.figure("note", note)
    missing = missing_packages()
    remedy = f"missing: {', '.join(missing)}; give their wheels with --wheels" if missing else "all are there"
    record.check("the packages that a run needs are installed", not missing, remedy)
    record.figure("vLLM", vllm_version())


def missing_packages() -> list[str]:
    """Return the distributions that pyproject.toml requires of a run and that are not installed."""
    text = (ROOT / "pyproject.toml").read_text()
    found = []
    for pattern in (r"(?ms)^dependencies = \[(.*?)^\]", r"(?ms)^train = \[(.*?)^\]"):
        match = re.search(pattern, text)
        assert match is not None, pattern
        found += re.findall(r'"([A-Za-z0-9-]+)', match[1])
    return [name for name in found if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def vllm_version() -> str:
    """Return the version of vLLM in its environment, or why there is none."""
    from data.vllm.environment import find_python
    from eagle31.errors import UserError

    try:
        python = find_python()
    except UserError as error:
        return f"not installed: {error}"
    names = {
        path.name.partition("-")[2]
        for path in python.parent.parent.glob("lib/python3*/site-packages/vllm*.dist-info")
    }
    return ", ".join(sorted(name.removesuffix(".dist-info") for name in names)) or f"in {python}"
