"""The memory of the host through which states leave vLLM's cache; it is allocated once."""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

# 2 GiB. PyTorch rounds pinned memory up to a power of two.
STAGING_BYTES = 1 << 31
_ALIGNMENT = 512


@dataclass(frozen=True)
class Region:
    """A part of the staging memory, in bytes."""

    start: int
    num_bytes: int


class Staging:
    """Memory that copies take parts of and give back, in any order.

    Allocating pinned memory takes a second for each GB, and waits for the GPU. So copies share one buffer.

    Args:
        pinned: whether the GPU copies to it while the host continues.
    """

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        num_bytes = _aligned(num_bytes)
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._lock = threading.Lock()
        self._free = [Region(0, num_bytes)]  # by start; no two are adjacent

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return sum(region.num_bytes for region in self._free)

    def take(self, num_bytes: int) -> Region | None:
        """Return the first free part of this size, or None where none is that large."""
        num_bytes = _aligned(num_bytes)
        with self._lock:
            for index, free in enumerate(self._free):
                if free.num_bytes >= num_bytes:
                    rest = Region(free.start + num_bytes, free.num_bytes - num_bytes)
                    self._free[index : index + 1] = [rest] if rest.num_bytes else []
                    return Region(free.start, num_bytes)
        return None

    def give(self, region: Region) -> None:
        """Return a part, which nothing reads or writes any more."""
        with self._lock:
            merged: list[Region] = []
            for one in sorted([*self._free, region], key=lambda one: one.start):
                if merged and merged[-1].start + merged[-1].num_bytes == one.start:
                    one = _joined(merged.pop(), one)
                merged.append(one)
            self._free = merged

    def view(self, region: Region, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor at the beginning of a part."""
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        assert num_bytes <= region.num_bytes
        return self._buffer[region.start : region.start + num_bytes].view(dtype).view(shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _joined(one: Region, following: Region) -> Region:
    return Region(one.start, one.num_bytes + following.num_bytes)
