"""Which tensors Triton's kernels take."""

from torch import Tensor


def has_triton(x: Tensor) -> bool:
    """Return whether kernels of Triton compute on this tensor. Callers import them where this is true."""
    return x.device.type == "cuda"
