"""Which optimizer steps are skipped: those whose gradient is not finite, or far longer than before."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from data.batches.loader import RowLoader
from eagle31.errors import UserError
from train.distributed import World
from train.tracking import Tracker
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.host_copy import HostCopy

REFERENCE_DECAY = 0.9  # of the moving average of the norms of the steps that were taken


@dataclass(frozen=True)
class SkippedStep:
    """A step that changed neither weights nor optimizer states."""

    step: int
    grad_norm: float | None  # None: not finite
    reference: float | None  # the average norm of the steps before; None: there were none

    def __str__(self) -> str:
        if self.grad_norm is None:
            return "the loss or the gradient is not finite"
        return f"the gradient's norm is {self.grad_norm:.3g}, and {self.reference:.3g} was the average before"


class StepGuard:
    """Decides which steps to skip. It works on the device, and the host learns of a step after the next one.

    Every rank decides alike, because the norm is that of the reduced gradient.

    Args:
        max_norm_jump: a gradient whose norm is more than this many times the average norm of the steps before
            is skipped. None: only gradients that are not finite are.
        max_skipped_steps: the run ends after this many skipped steps in a row.
        name_samples: returns the ids of samples, by their indices.
    """

    def __init__(
        self,
        max_norm_jump: float | None = None,
        max_skipped_steps: int = 10,
        name_samples: Callable[[Sequence[int]], list[str]] | None = None,
    ) -> None:
        self.max_norm_jump = max_norm_jump
        self.max_skipped_steps = max_skipped_steps
        self.name_samples = name_samples or (lambda indices: [str(index) for index in indices])
        self.num_in_a_row = 0  # skipped steps up to the newest one that the host knows
        self._reference: Tensor | float = torch.nan  # float32 [], once there is a step
        self._newest = torch.zeros(3)  # of the newest step: whether it is refused, its norm, the reference
        self._pending: deque[tuple[int, HostCopy]] = deque()

    @property
    def reference(self) -> float | None:
        """The average norm of the steps that were taken; None before the first. Waits for the device."""
        value = float(self._reference)
        return None if value != value else value

    @reference.setter
    def reference(self, value: float | None) -> None:
        self._reference = torch.nan if value is None else value

    @property
    def newest_refused(self) -> Tensor:
        """Whether the newest step was refused. bool [], on the device."""
        return self._newest[0] > 0

    def refuses(self, grad_norm: Tensor) -> Tensor:
        """Return whether to skip the step with this gradient norm. float [] -> bool []."""
        norm = grad_norm.detach().float()
        reference = self._reference
        if not isinstance(reference, Tensor) or reference.device != norm.device:
            reference = norm.new_full((), float(reference))
        # DeepSpeed replaces the norm of a gradient that is not finite by -1 at some ZeRO stages.
        refused = ~norm.isfinite() | (norm < 0)
        if self.max_norm_jump is not None:
            refused = refused | (norm > self.max_norm_jump * reference)  # false while there is no reference
        average = torch.where(reference.isnan(), norm, torch.lerp(norm, reference, REFERENCE_DECAY))
        # A step without supervised positions has a gradient of zeros, and says nothing of the next one.
        self._reference = torch.where(refused | (norm == 0), reference, average)
        self._newest = torch.stack([refused.float(), norm, reference])
        return refused

    def record(self, step: int) -> None:
        """Note the decision on the newest step; its values are copied without waiting for the device."""
        self._pending.append((step, HostCopy(self._newest)))

    def collect(self, *, wait: bool) -> list[SkippedStep]:
        """Return the skipped steps since the last call; the newest step is left for later unless `wait`."""
        found = []
        while len(self._pending) > (0 if wait else 1):
            step, copied = self._pending.popleft()
            refused, norm, reference = copied.read()
            self.num_in_a_row = self.num_in_a_row + 1 if refused else 0
            if refused:
                finite = 0 <= norm < float("inf")
                found.append(
                    SkippedStep(step, norm if finite else None, None if reference != reference else reference)
                )
        return found

    def check(self, last_saved: str) -> None:
        """Raise UserError if too many steps in a row were skipped.

        Args:
            last_saved: where the newest checkpoint is.
        """
        if self.num_in_a_row >= self.max_skipped_steps:
            raise UserError(
                "optim.max_skipped_steps",
                self.max_skipped_steps,
                f"The last {self.num_in_a_row} steps were all skipped: training has diverged, or its data is "
                "damaged. metrics.jsonl names their samples. They changed no weight and no checkpoint; "
                f"{last_saved}. If samples recur, look at them with scripts/inspect_data; otherwise lower "
                "optim.lr, or start from other weights.",
            )


def spoiled_unless_finite(loss: Tensor) -> Tensor:
    """Return 1, or NaN for a loss that is not finite. [] -> [].

    The backward pass of a loss times this gives a gradient of NaN. Reduced over the ranks, it makes all of
    them skip the step, without another collective operation.
    """
    return torch.where(loss.detach().isfinite(), 1.0, torch.nan).to(loss.dtype)


def report_skipped(
    guard: StepGuard,
    loader: RowLoader,
    tracker: Tracker,
    checkpoints: CheckpointDirectory,
    state: TrainState,
    world: World,
    *,
    wait: bool,
) -> None:
    """Log the steps that were skipped, with their samples. Every rank calls.

    Args:
        wait: whether to wait for the newest step; otherwise the next call reports it.

    Raises:
        UserError: too many steps in a row were skipped.
    """
    for one in guard.collect(wait=wait):
        state.skipped_steps += 1
        if world.is_main:
            names = guard.name_samples(loader.step_samples(one.step - 1))
            tracker.log({"kind": "skipped"} | asdict(one) | {"samples": names})
            print(f"train: step {one.step} is skipped: {one}. Its samples: {', '.join(names)}", flush=True)
    guard.check(checkpoints.newest())
