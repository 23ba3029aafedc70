"""What is used of DeepSpeed's internals."""

from typing import Any

import deepspeed
import torch

from eagle31.errors import UserError

# Of its optimizers, the float32 weights first; and of each weight.
OF_OPTIMIZER = {
    "DeepSpeedZeroOptimizer": ("single_partition_of_fp32_groups", "averaged_gradients"),
    "DeepSpeedZeroOptimizer_Stage3": (
        "fp32_partitioned_groups_flat",
        "averaged_gradients",
        "grad_position",
        "get_param_id",
    ),
}
_OF_WEIGHT = {1: ("_hp_mapping",), 2: ("_hp_mapping",), 3: ("ds_id", "ds_numel", "ds_shape")}


class ModelEngine(deepspeed.DeepSpeedEngine):
    """DeepSpeed's engine with the same optimizer for ZeRO 1 as for ZeRO 2.

    The one that DeepSpeed has for ZeRO 1 in bf16 takes no step whose gradient is zero or not finite.
    """

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        zero = self._configure_zero_optimizer(optimizer)
        zero.compute_grad_norm = False  # the step does, without waiting for the device
        return zero


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
