"""Copies of small tensors between the host and a device, for which the host does not wait."""

from collections.abc import Sequence
from typing import Any

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


class HostCopy:
    """A copy of a small device tensor on the host, started now and read later.

    The host waits for what was queued before the copy, not for what was queued after it. Read once the rest
    of a step is queued, the copy leaves the device enough to do.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Any]:
        """Return the values; waits where the copy has not arrived yet."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._values.tolist()
