"""What the kernels of GPUs reach, to predict times with."""

import re
from dataclasses import dataclass

from eagle31.cost.devices import peak_bf16_flops

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
