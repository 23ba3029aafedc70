"""Where the flash kernel for CUDA can be used."""

import warnings
from functools import cache

import torch

LARGEST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8  # narrower heads are padded


def padded_head_dim(head_dim: int) -> int:
    """Return the width of a head in the flash kernel."""
    return -(-head_dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def flash_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the flash kernel cannot train heads of this width on a CUDA device, or None if it can.

    Source: FlashAttention-2's requirements, as `sdp_utils.cpp` of PyTorch checks them.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim > LARGEST_HEAD_DIM:
        return f"the kernel has heads of at most {LARGEST_HEAD_DIM}, not {head_dim}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of PyTorch does not have the kernel"
    card = torch.cuda.get_device_properties(device)
    capability = (card.major, card.minor)
    if capability < (8, 0):
        return f"the kernel needs compute capability 8.0, and the card has {card.major}.{card.minor}"
    small_memory = (8, 6) <= capability <= (8, 9) or card.major == 12
    if small_memory and 192 < padded_head_dim(head_dim) <= 224:
        return f"on compute capability {card.major}.{card.minor} the kernel cannot train heads of {head_dim}"
    return None


@cache
def warn_once(device: torch.device, obstacle: str) -> None:
    """Warn, once for each reason, that attention is computed without the flash kernel."""
    name = torch.cuda.get_device_properties(device).name
    warnings.warn(
        f"{name}: attention is computed by matrix products, which is slower than FlashAttention: {obstacle}.",
        stacklevel=2,
    )
