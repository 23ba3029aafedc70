"""The exponential moving average of the weights, next to the master weights and divided as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor


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
        self._averages: list[Tensor] = []

    @property
    def begun(self) -> bool:
        """Whether there is an average: after the first step."""
        return self.num_updates > 0

    @torch.no_grad()
    def update(self, refused: Tensor) -> None:
        """Add the weights after a step. `refused` is a bool [], whether the step was skipped."""
        masters = master_weights(self.model_engine)
        if not self.begun:
            self._averages = [master.detach().clone() for master in masters]
        else:
            share = 1 - min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
            for average, master in zip(self._averages, masters, strict=True):
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

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has of this rank's part."""
        return {"num_updates": self.num_updates, "averages": self._averages}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned on the same rank."""
        masters = master_weights(self.model_engine)
        self.num_updates = state["num_updates"]
        self._averages = [
            average.to(master.device) for average, master in zip(state["averages"], masters, strict=True)
        ]

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, master in zip(self._averages, master_weights(self.model_engine), strict=True):
            weights = master.detach().clone()
            master.copy_(average)
            average.copy_(weights)
        _refresh_model(self.model_engine)


def master_weights(model_engine: deepspeed.DeepSpeedEngine) -> list[Tensor]:
    """Return the float32 weights that this rank updates: the drafter's own at ZeRO 0, else partitions."""
    optimizer = model_engine.optimizer
    for name in (
        "single_partition_of_fp32_groups",  # ZeRO 1 and 2
        "fp32_groups_flat_partition",  # DeepSpeed's optimizer for bf16, at ZeRO 1
        "fp32_partitioned_groups_flat",  # ZeRO 3
    ):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    assert not model_engine.zero_optimization()
    return list(model_engine.module.drafter.parameters())


def _refresh_model(model_engine: deepspeed.DeepSpeedEngine) -> None:
    """Round the master weights into the model's. Every rank calls."""
    if not model_engine.zero_optimization():
        return  # they are the same tensors
    for parameter in model_engine.module.drafter.parameters():
        value = safe_get_full_fp32_param(parameter)
        assert value is not None
        # With ZeRO 3 all ranks write, and rank 0's values are divided among them.
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0):
            parameter.data.copy_(value)
