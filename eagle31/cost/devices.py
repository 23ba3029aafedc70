"""The dtypes that devices compute well in, and the rates of GPUs, to compare with and predict times from."""

import re
from dataclasses import dataclass

import torch

# The names in `torch.cpu.get_capabilities()` of the instructions that compute in a dtype.
_CPU_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def computes_natively(dtype: torch.dtype) -> bool:
    """Return whether this machine has a GPU, or a CPU with instructions for the dtype."""
    if torch.cuda.is_available() or dtype not in _CPU_INSTRUCTIONS:
        return True
    has = torch.cpu.get_capabilities()
    return any(has.get(name) for name in _CPU_INSTRUCTIONS[dtype])


# Dense bf16 FLOP/s with accumulation in float32. More specific names come first.
# Source: the vendors' data sheets.
_PEAK_BF16 = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("GH200|H100|H200|H800", 989e12),
    ("H20", 148e12),
    ("A100|A800", 312e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("RTX A6000", 154.8e12),
    ("MI300X|MI325X", 1307.4e12),
)


def peak_bf16_flops(device_name: str) -> float | None:
    """Return a GPU's peak rate in FLOP/s by its name; None where it is not known.

    Args:
        device_name: as `torch.cuda.get_device_name` returns it, such as "NVIDIA H100 80GB HBM3".
    """
    for pattern, rate in _PEAK_BF16:
        if re.search(rf"\b({pattern})\b", device_name):
            return rate
    return None


# What kernels reach, to predict times with.
# Matrix products of the best shapes reach 0.80 of the peak on H100 and H200 and 0.82 to 0.86 on A100; those
# of a step have other shapes. Source: "maximum achievable matmul FLOPS" of stas00/ml-engineering.
_MATMUL_FRACTION = 0.7
# Large copies reach 0.90, and reductions less. Source: systems/a100_80g.json of calculon-ai/calculon.
_BANDWIDTH_FRACTION = 0.85
# By name: bytes per second of the GPU's memory and of the link to the host, by NVIDIA's data sheets of the
# SXM cards with the most memory; and the fraction of the peak that attention reaches. PyTorch's kernel is
# FlashAttention-2. It reaches 0.35 on Hopper (arXiv 2407.08608), and 0.50 to 0.73 on A100 (arXiv 2307.08691).
_GPUS = (("H200", 4.8e12, 64e9, 0.35), ("H100", 3.35e12, 64e9, 0.35), ("A100", 2.039e12, 32e9, 0.6))


@dataclass(frozen=True)
class GpuRates:
    """What a GPU's kernels reach, per second."""

    peak: float  # FLOPs of dense bf16 products, by the data sheet
    matmul: float  # FLOPs
    attention: float  # FLOPs
    bandwidth: float  # bytes of the GPU's memory
    host_bandwidth: float  # bytes between the host's memory and the GPU's
    # The least time of an operation: eager PyTorch takes the host at least as long to enqueue one, from
    # Python to the driver. A kernel alone takes 2 or 3 microseconds.
    launch_seconds: float = 5e-6


def gpu_rates(device_name: str) -> GpuRates | None:
    """Return what a GPU's kernels reach, by its name; None where that is not known."""
    peak = peak_bf16_flops(device_name)
    for name, memory, link, attention in _GPUS:
        if peak is not None and re.search(rf"\b{name}\b", device_name):
            return GpuRates(
                peak,
                _MATMUL_FRACTION * peak,
                attention * peak,
                _BANDWIDTH_FRACTION * memory,
                _BANDWIDTH_FRACTION * link,
            )
    return None
