"""The optimizer steps that were skipped, because their loss or their gradient was not finite."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle31.errors import UserError
from train.trainer.host_copy import HostCopy

MAX_SKIPPED = 10  # in a row, after which the run ends


class SkippedSteps:
    """What the host knows of the skipped steps. The device decides, and the host learns it a step later.

    Args:
        lr: AdamW's peak learning rate, for the message.
        samples_of: returns the names of the samples of a step, counted from 1.
    """

    def __init__(self, lr: float, samples_of: Callable[[int], Sequence[str]]) -> None:
        self.lr = lr
        self.samples_of = samples_of
        self.num_in_a_row = 0  # up to the newest step that the host knows
        self._pending: deque[tuple[int, HostCopy]] = deque()

    def record(self, step: int, refused: Tensor) -> None:
        """Note the decision on a step, bool []; it is copied without waiting for the device."""
        self._pending.append((step, HostCopy(refused)))

    def collect(self, *, wait: bool) -> list[int]:
        """Return the skipped steps since the last call; the newest step is left for later unless `wait`."""
        found = []
        while len(self._pending) > (0 if wait else 1):
            step, refused = self._pending.popleft()
            self.num_in_a_row = self.num_in_a_row + 1 if refused.read() else 0
            if self.num_in_a_row:
                found.append(step)
        return found

    def check(self, last_saved: str) -> None:
        """Raise UserError if too many steps in a row were skipped.

        Args:
            last_saved: where the newest checkpoint is.
        """
        if self.num_in_a_row >= MAX_SKIPPED:
            raise UserError(
                "optim.lr",
                self.lr,
                f"The last {self.num_in_a_row} steps were skipped, because their loss or gradient was not "
                "finite: training has diverged, or its data is damaged. metrics.jsonl names their samples. "
                f"They changed no weight and no checkpoint; {last_saved}. If samples recur, look at them "
                "with scripts/inspect_data; otherwise lower this rate, or start from other weights.",
            )


def spoiled_unless_finite(loss: Tensor) -> Tensor:
    """Return 1, or NaN for a loss that is not finite. [] -> [].

    The backward pass of a loss times this gives a gradient of NaN. Reduced over the ranks, it makes all of
    them skip the step, without another collective operation.
    """
    return torch.where(loss.detach().isfinite(), 1.0, torch.nan).to(loss.dtype)
