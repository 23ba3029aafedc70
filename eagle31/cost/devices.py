"""The dtypes that devices compute well in, and the peak rates of GPUs."""

import re

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
