"""The model engine: DeepSpeed around the drafter.

What is done here and in the files next to this one although DeepSpeed has a part for it, and why:

    checkpoints   its own resume with the same ranks and ZeRO stage alone, and run code when they are read
    clipping      it clips, and skips steps, differently at every ZeRO stage, and waits for the device
    Muon          its own changes the gradient before the norm is computed, so clipping would see the result
    rounding      at ZeRO 0 in bf16 it accumulates gradients in bf16, and keeps the float32 weights to itself
    the last row  it counts micro-batches, and steps here may have fewer rows on some ranks
"""

import copy
import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, redirect_stdout
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from eagle31.kernels.newton_schulz import orthogonalization_dtype
from eagle31.model.drafter import Drafter
from eagle31.model.eagle import EagleDrafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch
from eagle31.training.drift import Drift, DriftRows, measure_drift
from eagle31.training.schedule import RolloutSchedule
from eagle31.training.step import DepthSums, rollout_loss
from eagle31.training.teacher_forced import by_draft_length, greedy_hits
from train.trainer.engine_state import check_internals
from train.trainer.matrices import is_matrix
from train.trainer.optimizer import Muon

# Adam's decay rates and its epsilon: those of EAGLE, and PyTorch's.
BETAS, EPS = (0.9, 0.95), 1e-8


class TrainedModule(nn.Module):
    """The drafter with its training step; its only parameters are the drafter's."""

    def __init__(
        self,
        drafter: Drafter,
        frozen: FrozenParts,
        num_steps: int,
        step_decay: float,
        row_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.frozen = frozen
        self.num_steps = num_steps
        self.step_decay = step_decay
        self.row_group = row_group  # the ranks that share rows
        self._without_hooks = DrafterWithoutHooks(drafter)
        self.gathers_all = False  # whether the model engine partitions the weights, at ZeRO 3

    def forward(
        self, batch: PackedBatch, schedule: RolloutSchedule | None = None, with_metrics: bool = True
    ) -> tuple[Tensor, DepthSums]:
        """Return the unnormalized loss of one micro-batch and the sums per depth; see `rollout_loss`."""
        return rollout_loss(
            self._drafter(),
            self.frozen,
            batch,
            num_steps=self.num_steps if schedule is None else len(schedule.chunks[0].steps),
            step_decay=self.step_decay,
            with_metrics=with_metrics,
            schedule=schedule,
            row_group=self.row_group,
        )

    def hits(self, batch: PackedBatch, longest: int, chunk_rows: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield which greedy drafts are right, by draft length; see `greedy_hits`. Needs `gathered`."""
        drafter = self._drafter()
        hits = partial(greedy_hits, drafter, self.frozen, batch, chunk_rows=chunk_rows)
        return by_draft_length(drafter, longest, hits)

    def drift(self, chosen: DriftRows) -> Drift | None:
        """Measure drift, which only chains have; see `measure_drift`. Needs `gathered`."""
        drafter = self._drafter()
        return measure_drift(drafter, self.frozen, chosen) if isinstance(drafter, EagleDrafter) else None

    def _drafter(self) -> Drafter:
        """Return the drafter with weights of the dtype that the step computes in.

        DeepSpeed's hooks at ZeRO 3 would count how often each module is called, which differs between ranks.
        """
        dtype = self.frozen.embed_tokens.dtype
        if self.drafter.fc.weight.dtype == dtype and not self.gathers_all:
            return self.drafter
        return self._without_hooks(dtype)

    def gather_all(self) -> None:
        """Have ZeRO 3 gather all weights for a forward and backward pass."""
        self.gathers_all = True
        for parameter in self.parameters():
            deepspeed.zero.register_external_parameter(self, parameter)

    def release(self) -> None:
        """Free the weights that only the forward pass needs."""
        self._without_hooks.release()

    def gathered(self) -> AbstractContextManager[None]:
        """Keep all weights on every rank, which ZeRO 3 partitions. Every rank enters."""
        return deepspeed.zero.GatheredParameters(list(self.parameters()))


class Bf16Optimizer(BF16_Optimizer):
    """DeepSpeed's optimizer for ZeRO 1 in bf16, whose step leaves it to the wrapped optimizer to skip.

    Every rank has the whole reduced gradient.
    """

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


class ModelEngine(deepspeed.DeepSpeedEngine):
    """DeepSpeed's engine with `Bf16Optimizer`."""

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> Bf16Optimizer:
        return Bf16Optimizer(
            optimizer,
            self.param_names,
            bfloat16_config=self._config.bfloat16_config,
            allgather_bucket_size=self.zero_allgather_bucket_size(),
            dp_process_group=self.seq_data_parallel_group,
            grad_acc_dtype=torch.float32,
        )


def deepspeed_config(
    *,
    zero_stage: int,
    bf16: bool,
    micro_batches: int,
    world_size: int,
    offload_optimizer: bool,
) -> dict[str, Any]:
    """Return the config for `deepspeed.initialize`; a micro-batch is one packed row.

    Gradients are reduced, and accumulated over micro-batches, in float32.

    Args:
        micro_batches: the most that a rank has in an optimizer step. `optimizer_step` says which is a step's
            last one.
    """
    zero: dict[str, Any] = {"stage": zero_stage}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    elif zero_stage == 2 or (zero_stage == 1 and not bf16):
        zero["compute_grad_norm"] = False  # the step does
    return {
        "train_batch_size": micro_batches * world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        # The mean is taken in bf16 at ZeRO 2, and rounds where the number of ranks is no power of two.
        "gradient_allreduce_op": "mean" if zero_stage == 3 else "sum",
        "gradient_clipping": 0.0,  # the step clips
        # At ZeRO 0 DeepSpeed would accumulate in bf16; there `TrainedModule` rounds float32 weights.
        "bf16": {
            "enabled": bf16 and zero_stage > 0,
            "immediate_grad_update": True,  # frees the bf16 gradient of a weight once it is accumulated
            "check_grad_overflow": False,  # the step does, and this would wait for the device
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "timers": {"throughput": {"enabled": False}},  # it waits for the device twice in a micro-batch
    }


def initialize_model_engine(
    module: TrainedModule,
    config: dict[str, Any],
    *,
    lr: float,
    matrix_lr: float | None = None,
) -> deepspeed.DeepSpeedEngine:
    """Wrap the module in a DeepSpeed engine; the process group must exist.

    Args:
        matrix_lr: peak rate of Muon, which then updates the matrices. None: AdamW updates all weights.
    """
    # EAGLE decays no weights; PyTorch's default is 0.01.
    settings: dict[str, Any] = {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
    optimizer: torch.optim.AdamW
    matrices, others = split_weights(module.drafter)
    if matrix_lr is None:
        groups = [{"params": list(module.parameters()), "lr_ratio": 1.0}]
        optimizer = torch.optim.AdamW(groups, fused=True, **settings)
    else:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        dtype = orthogonalization_dtype(device, module.frozen.embed_tokens.dtype)
        optimizer = Muon(matrices, others, matrix_lr, device=device, dtype=dtype, **settings)
        if Muon not in ZERO_SUPPORTED_OPTIMIZERS:
            ZERO_SUPPORTED_OPTIMIZERS.append(Muon)  # as AdamW is; DeepSpeed compares types
    if config["zero_optimization"]["stage"] == 3:
        module.gather_all()
    with redirect_stdout(io.StringIO()):  # DeepSpeed's optimizer for bf16 prints what memory it uses
        model_engine = ModelEngine(
            args=None,
            model=module,
            optimizer=optimizer,
            config=config,
            config_class=deepspeed.DeepSpeedConfig(config),
        )
    check_internals(model_engine)
    if isinstance(optimizer, Muon):
        optimizer.attach(model_engine, matrices)
    return model_engine


def split_weights(drafter: Drafter) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the weights that Muon updates, and those that AdamW does."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in drafter.named_parameters():
        (matrices if is_matrix(name, parameter.shape) else others).append(parameter)
    return matrices, others


def full_state(model_engine: deepspeed.DeepSpeedEngine, *, keep: bool) -> dict[str, Tensor]:
    """Return the drafter's weights by name, float32 on the CPU. Every rank calls.

    They are the master weights.

    Args:
        keep: False on the ranks that only take part in gathering the weights, which is done one by one;
            they return nothing.
    """
    state = {}
    for name, parameter in model_engine.module.drafter.named_parameters():
        value = safe_get_full_fp32_param(parameter) if model_engine.zero_optimization() else parameter.data
        assert value is not None, name
        if keep:
            state[name] = value.detach().to("cpu", torch.float32, copy=True)
    return state


def release_memory(model_engine: deepspeed.DeepSpeedEngine) -> None:
    """Frees the tensors that training held; hooks in autograd's graph may keep the engine itself alive."""
    model_engine.destroy()
    model_engine.module.release()
    held = [*model_engine.module.parameters()]
    held += [
        parameter for group in model_engine.basic_optimizer.param_groups for parameter in group["params"]
    ]
    model_engine.basic_optimizer.state.clear()
    for parameter in held:
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)


class DrafterWithoutHooks:
    """A drafter's modules once more, for a forward pass with its weights, rounded if they are float32.

    DeepSpeed accumulates in bf16 at ZeRO 0 in bf16, and keeps the float32 weights to itself. So there the
    model engine has the float32 weights, and this rounds them.
    """

    def __init__(self, drafter: Drafter) -> None:
        shared = {id(weight): weight for weight in drafter.parameters()}
        self._rounded = copy.deepcopy(drafter, shared)  # copies the modules, whose weights are replaced
        self._weights: list[tuple[nn.Module, nn.Module, str]] = []
        for source, module in zip(drafter.modules(), self._rounded.modules(), strict=True):
            for name in [name for name, weight in source._parameters.items() if weight is not None]:
                del module._parameters[name]
                self._weights.append((source, module, name))

    def __call__(self, dtype: torch.dtype) -> Drafter:
        """Return the drafter with weights of this dtype, which it keeps until the next call."""
        for source, module, name in self._weights:
            setattr(module, name, getattr(source, name).to(dtype))
        return self._rounded

    def release(self) -> None:
        """Free the rounded weights."""
        for _, module, name in self._weights:
            setattr(module, name, None)
