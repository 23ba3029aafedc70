"""Copies of small tensors to the host, for which it does not wait."""

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small device tensor on the host, started now and read later.

    The host waits for what was queued before the copy, not for what was queued after it. Read once the rest
    of a step is queued, the copy leaves the device enough to do.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)  # pinned
        self._event = torch.cuda.current_stream().record_event() if values.is_cuda else None

    def read(self) -> list[Any]:
        """Return the values; waits where the copy has not arrived yet."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._values.tolist()
