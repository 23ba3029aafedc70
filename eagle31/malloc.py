"""The C library's allocator, told to keep what is freed."""

import ctypes
import sys

import torch

# Of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 1 << 25  # glibc takes no more


def keep_freed_memory() -> None:
    """For processes that compute on the CPU under glibc; does nothing elsewhere.

    By default glibc returns large blocks to the kernel, which clears every page again when the next
    activations are allocated: up to a fifth of the CPU time of a small model's forward passes. Kept, memory
    stays at its peak until the process ends.
    """
    if torch.cuda.is_available() or not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, -1)  # never
