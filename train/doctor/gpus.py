"""The GPUs of this machine: how many, driver, memory, compute capability, and NCCL."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle31.kernels.flash_support import LARGEST_HEAD_DIM
from train.doctor.check import Check, Status, judged, ok
from train.planning.memory_check import gigabytes
from train.planning.plan import Plan
from train.planning.remedies import assignments
from train.planning.server_memory import CAPTURED_SEQUENCES

# The oldest driver of each CUDA version, by its minor compatibility.
# Source: CUDA Toolkit release notes, table "CUDA Toolkit and Minimum Required Driver Version".
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_BF16, _FP8, _VLLM = (8, 0), (8, 9), (7, 5)


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    num_bytes: int
    capability: tuple[int, int]


def found_gpus() -> list[Gpu]:
    """Return the GPUs that this process can use."""
    if not torch.cuda.is_available():
        return []
    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(one.name, one.total_memory, (one.major, one.minor)) for one in every]


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None where nvidia-smi does not report one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def driver_check(driver: str | None, cuda: str | None, num_gpus: int) -> Check | None:
    """Return whether the driver suits the CUDA build of torch; None on a machine without either.

    Args:
        driver: its version, None where there is none.
        cuda: the CUDA version of torch; None for a CPU build.
        num_gpus: how many torch finds.
    """
    if driver is None:
        if cuda is None:
            return None
        remedy = "torch finds no driver: install NVIDIA's, or start the container with --gpus all."
        return judged("driver", False, "none", _needed_driver(cuda), remedy, otherwise=Status.warning)
    if cuda is None:
        remedy = (
            "This torch is a CPU build: remove .venv and run scripts/quickstart, which installs the other."
        )
        return Check("driver", Status.lacking, f"{driver}, torch without CUDA", "torch with CUDA", remedy)
    oldest = _OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    old = oldest is not None and int(re.split(r"\D", driver)[0]) < oldest
    found = f"{driver}, torch for CUDA {cuda}"
    if num_gpus == 0 and not old:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        remedy = "nvidia-smi finds a GPU and torch none: see `python -c 'import torch; torch.cuda.init()'`"
        remedy += "." if shown is None else f"; CUDA_VISIBLE_DEVICES={shown} may hide it."
        return Check("driver", Status.lacking, f"{found}, which finds no GPU", _needed_driver(cuda), remedy)
    remedy = f"Install a newer driver, or a torch for an older CUDA (pip's --index-url), than {cuda}."
    return judged("driver", not old, found, _needed_driver(cuda), remedy)


def _needed_driver(cuda: str) -> str:
    oldest = _OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    return f"for CUDA {cuda}" if oldest is None else f"{oldest} or newer for CUDA {cuda}"


def count_check(gpus: Sequence[Gpu], needed: int, needed_bytes: int | None) -> Check:
    """Return whether there are as many GPUs as the recipe is planned for.

    Args:
        needed: 0 for a run that needs none.
        needed_bytes: memory of each; None: any.
    """
    names = {one.name for one in gpus}
    sizes = {gigabytes(one.num_bytes) for one in gpus}
    found = f"{len(gpus)} x {', '.join(sorted(names))} of {', '.join(sorted(sizes))}" if gpus else "none"
    if not needed:
        return ok("GPUs", found, "none")
    size = "" if needed_bytes is None else f" of {gigabytes(needed_bytes)}"
    remedy = "Run it on such a machine, or try the pipeline with recipe=quickstart here."
    if gpus:
        remedy = "Choose GPUs with CUDA_VISIBLE_DEVICES, or change the recipe's parallelism to fit these."
    return judged("GPUs", len(gpus) >= needed, found, f"{needed}{size}", remedy)


def plan_check(plan: Plan) -> Check:
    """Return whether the run fits these GPUs, by the plan's estimate."""
    layout = plan.layout
    found = "no GPU" if plan.gpu_bytes is None else f"{gigabytes(plan.gpu_bytes)} each"
    needed = f"{gigabytes(layout.memory.total)} for training"
    if layout.server is not None:
        needed += f", {gigabytes(layout.server.total(CAPTURED_SEQUENCES))} for vLLM"
    reasons = [layout.refusal] if layout.refusal else [str(one) for one in layout.shortages]
    remedy = " ".join(map(str, reasons)) or _adjustment(plan)
    if layout.works and layout.overrides:
        return Check("GPU memory", Status.warning, found, needed, remedy)
    return judged("GPU memory", layout.works, found, needed, remedy)


def _adjustment(plan: Plan) -> str:
    return f"With these GPUs, add {assignments(plan.layout.overrides)}." if plan.layout.overrides else ""


def cuda_version() -> str | None:
    """Return the CUDA version that torch was built for; None for a CPU build."""
    return torch.version.cuda


def capability_checks(
    gpus: Sequence[Gpu], *, bf16: bool, head_dim: int | None, in_vllm: bool, fp8_target: bool
) -> list[Check]:
    """Return whether the GPUs compute what the recipe asks for, at full speed.

    Args:
        bf16: whether training is in bf16.
        head_dim: of the drafter's attention; None: unknown.
        in_vllm: whether vLLM runs the target here.
        fp8_target: whether the target's weights are in fp8.
    """
    if not gpus:
        return []
    oldest = min(one.capability for one in gpus)
    found, checks = f"compute capability {_dotted(oldest)}", []
    if in_vllm:
        remedy = "vLLM does not run on this GPU: use another, or target.engine=hf capture=hf."
        checks.append(judged("GPU for vLLM", oldest >= _VLLM, found, _dotted(_VLLM), remedy))
    if fp8_target:
        remedy = "vLLM unpacks the target's fp8 weights on this GPU, which is slower."
        good = oldest >= _FP8
        checks.append(judged("GPU for fp8", good, found, _dotted(_FP8), remedy, otherwise=Status.warning))
    obstacle = None
    if not bf16:
        obstacle = "float32 has no flash kernel: deepspeed.precision=bf16."
    elif oldest < _BF16:
        obstacle = "The flash kernel and bf16 need a newer GPU; attention is computed by slower products."
    elif head_dim is not None and head_dim > LARGEST_HEAD_DIM:
        obstacle = (
            f"The flash kernel has heads of at most {LARGEST_HEAD_DIM}, and the drafter's have {head_dim}."
        )
    needed = f"{_dotted(_BF16)}, bf16, heads of at most {LARGEST_HEAD_DIM}"
    checks.append(
        judged("flash attention", obstacle is None, found, needed, obstacle or "", otherwise=Status.warning)
    )
    return checks


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def nccl_check(
    version: tuple[int, ...] | None, num_gpus: int, environment: Mapping[str, str], interfaces: Sequence[str]
) -> Check | None:
    """Return whether the processes on several GPUs can communicate; None where there is at most one.

    Args:
        version: NCCL's; None where torch has none.
        interfaces: names of this machine's network interfaces.
    """
    if num_gpus < 2:
        return None
    if version is None:
        remedy = "This torch has no NCCL: install its CUDA build for Linux."
        return Check("NCCL", Status.lacking, "none", "NCCL", remedy)
    found, named = ".".join(map(str, version)), environment.get("NCCL_SOCKET_IFNAME")
    if not named:
        return ok("NCCL", found)
    # =eth0 is exact, eth is a prefix, ^lo leaves out. Source: NCCL's environment variables.
    wanted = [one.lstrip("=") for one in named.split(",")]
    good = named.startswith("^") or any(one.startswith(tuple(wanted)) for one in interfaces)
    remedy = f"No interface has that name; there are {', '.join(interfaces)}: change or unset it."
    return judged("NCCL", good, f"{found}, NCCL_SOCKET_IFNAME={named}", "one of the interfaces", remedy)


def nccl_version() -> tuple[int, ...] | None:
    """Return NCCL's version; None where torch has none."""
    if not torch.distributed.is_nccl_available() or not torch.cuda.is_available():
        return None
    return tuple(torch.cuda.nccl.version())
