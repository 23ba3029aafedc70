"""DeepSpeed's engine, without the host's waits for the device at ZeRO 0, 1 and 2.

What DeepSpeed's own steps wait for is the gradient's norm: it is compared on the host at ZeRO 1 in bf16 and
at ZeRO 3, and constants for it are copied to the device at every stage. `gradient_norm` leaves it there.
"""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor
from torch.nn.utils import get_total_norm

from eagle31.errors import UserError

# What is used of DeepSpeed's internals: of its optimizers, the float32 weights first, and of each weight.
_NORM = "_global_grad_norm"
OF_OPTIMIZER = {
    "DeepSpeedZeroOptimizer": ("single_partition_of_fp32_groups", "averaged_gradients", _NORM),
    "Bf16Optimizer": (
        "fp32_groups_flat_partition",
        "fp32_groups_gradient_flat_partition",
        "fp32_groups_gradients_flat",
        "update_lp_params",
    ),
    "DeepSpeedZeroOptimizer_Stage3": ("fp32_partitioned_groups_flat", "grad_position", "get_param_id", _NORM),
}
_OF_WEIGHT = {1: ("_hp_mapping",), 2: ("_hp_mapping",), 3: ("ds_id", "ds_numel", "ds_shape")}


class ModelEngine(deepspeed.DeepSpeedEngine):
    """DeepSpeed's engine around a `ClippedAdamW`."""

    def step(self, lr_kwargs: None = None) -> None:
        """Update the weights, after the backward pass of a step's last micro-batch. Every rank calls."""
        if not self.is_gradient_accumulation_boundary():
            super().step(lr_kwargs)
            return
        self.basic_optimizer.begin_step(gradient_norm(self))
        super().step(lr_kwargs)
        self.basic_optimizer.end_step()

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> "Bf16Optimizer":
        return Bf16Optimizer(
            optimizer,
            self.param_names,
            bfloat16_config=self._config.bfloat16_config,
            allgather_bucket_size=self.zero_allgather_bucket_size(),
            dp_process_group=self.seq_data_parallel_group,
            grad_acc_dtype=torch.float32,
        )


class Bf16Optimizer(BF16_Optimizer):
    """DeepSpeed's optimizer for ZeRO 1 in bf16, whose step leaves it to the wrapped optimizer to skip."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update this rank's float32 weights, and gather them in bf16."""
        assert closure is None
        partitions = zip(
            self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True
        )
        for weights, gradients in partitions:
            weights.grad = gradients
        self.optimizer.step()
        self.update_lp_params()  # the engine clears the gradients


def check_internals(model_engine: deepspeed.DeepSpeedEngine) -> None:
    """Raise UserError if the installed DeepSpeed lacks an internal that is used here."""
    used: dict[Any, tuple[str, ...]] = {model_engine: ("basic_optimizer", "gradient_average")}
    if model_engine.zero_optimization():
        optimizer, stage = model_engine.optimizer, model_engine.zero_optimization_stage()
        used[optimizer] = OF_OPTIMIZER.get(type(optimizer).__name__, (f"weights at ZeRO {stage}",))
        used[next(model_engine.module.parameters())] = _OF_WEIGHT[stage]
    missing = [
        f"{type(o).__name__}.{name}" for o, names in used.items() for name in names if not hasattr(o, name)
    ]
    if missing:
        remedy = f"It has no {', '.join(missing)}; install the version that pyproject.toml names."
        raise UserError("deepspeed", deepspeed.__version__, remedy)


def computes_norm(zero: dict[str, Any]) -> bool:
    """Return whether DeepSpeed's step computes the gradient's norm, from the config of ZeRO."""
    return zero["stage"] == 3 or "offload_optimizer" in zero


def gradient_norm(model_engine: deepspeed.DeepSpeedEngine) -> Tensor | None:
    """Return the norm of the reduced gradient, float32 [], after the last backward pass of a step.

    None: DeepSpeed's step computes it, at ZeRO 3 or with the optimizer on the CPU. Every rank calls.
    """
    if not model_engine.zero_optimization():
        return get_total_norm([p.grad for p in model_engine.module.parameters() if p.grad is not None])
    if computes_norm(model_engine.config["zero_optimization"]):
        return None
    if isinstance(model_engine.optimizer, Bf16Optimizer):  # every rank has the whole gradient
        return get_total_norm(model_engine.optimizer.fp32_groups_gradients_flat)
    groups = model_engine.optimizer.averaged_gradients.values()
    squared = get_total_norm([part for group in groups for part in group]).square()
    dist.all_reduce(squared)
    return squared.sqrt()
