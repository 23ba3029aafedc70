"""The recipe's schema for the optimizer, DeepSpeed and the training loop."""

from dataclasses import dataclass, field
from enum import Enum

from eagle31.training.objectives import Loss


class Schedule(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


@dataclass
class OptimConfig:
    lr: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = Schedule.cosine
    warmup_fraction: float = 0.015
    min_lr_fraction: float = 0.0
    max_grad_norm: float = 0.5


@dataclass
class DeepSpeedConfig:
    zero_stage: int = 0
    precision: Precision = Precision.bf16
    offload_optimizer: bool = False
    offload_parameters: bool = False


@dataclass
class TrainConfig:
    ttt_steps: int = 7
    step_decay: float = 0.8
    loss: Loss = Loss.kl
    lk_eta: float = 3.0  # of lk_lambda: how early it turns from KL to the acceptance rate
    # Whether a draft counts where the target's greedy token lies outside the draft vocabulary.
    count_outside_vocab: bool = True
    activation_checkpointing: bool = False  # for very long rows: less memory, about a sixth more work
    row_tokens: int = 2048
    rows_per_step: int = 8  # packed rows of one optimizer step, over all ranks
    max_steps: int | None = None  # null: num_epochs
    num_epochs: int = 1
    log_every: int = 10
    validate_every: int = 200
    save_every: int = 200
    keep_checkpoints: int = 3
