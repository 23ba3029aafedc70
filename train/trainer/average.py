"""The exponential moving average of the weights, next to the master weights and divided as they are."""

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import torch
from torch import Tensor

from train.checkpoint.engine_state import master_weights, refresh_model


class WeightAverage:
    """Averages the float32 master weights that this rank updates: average <- d * average + (1 - d) * weights.

    d is `decay`, and less in the first steps, min(decay, (1 + n) / (10 + n)) after n of them, so that the
    average forgets the initial weights (as `tf.train.ExponentialMovingAverage` with num_updates). A skipped
    step leaves the average as it is. Nothing waits for the device.

    Args:
        decay: in (0, 1).
    """

    def __init__(self, model_engine: deepspeed.DeepSpeedEngine, decay: float) -> None:
        self.model_engine = model_engine
        self.decay = decay
        self.num_updates = 0
        self.averages: list[Tensor] = []  # of the tensors of `master_weights`

    @property
    def begun(self) -> bool:
        """Whether there is an average: after the first step."""
        return self.num_updates > 0

    @torch.no_grad()
    def update(self, refused: Tensor) -> None:
        """Add the weights after a step. `refused` is a bool [], whether the step was skipped."""
        masters = master_weights(self.model_engine)
        if not self.begun:
            self.averages = [master.detach().clone() for master in masters]
        else:
            share = 1 - min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
            for average, master in zip(self.averages, masters, strict=True):
                weight = torch.where(refused, 0.0, share).to(average, non_blocking=True)
                average.lerp_(master, weight)
        self.num_updates += 1

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Have the model engine hold the averaged weights within the context. Every rank enters."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def begin(self, num_updates: int) -> None:
        """Have `averages`, which a checkpoint then fills, after this many steps."""
        masters = master_weights(self.model_engine)
        self.averages = [master.detach().clone() for master in masters] if num_updates else []
        self.num_updates = num_updates

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, master in zip(self.averages, master_weights(self.model_engine), strict=True):
            weights = master.detach().clone()
            master.copy_(average)
            average.copy_(weights)
        refresh_model(self.model_engine)
