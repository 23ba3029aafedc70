"""Copies of small tensors to a device, for which the host does not wait."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to a device in one transfer, for which the host does not wait.

    A non-blocking copy of pageable memory waits nevertheless, so the tensors go through one pinned buffer.

    Args:
        tensors: on the CPU, each with one dimension, all with one dtype.
    """
    if device.type == "cpu" or not tensors:
        return list(tensors)
    lengths = [len(x) for x in tensors]
    buffer = torch.empty(sum(lengths), dtype=tensors[0].dtype, pin_memory=True)
    torch.cat(list(tensors), out=buffer)
    return list(buffer.to(device, non_blocking=True).split(lengths))
