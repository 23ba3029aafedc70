"""The recipe's schema for the optimizer, DeepSpeed, the training loop and its metrics."""

from dataclasses import dataclass

from omegaconf import II

from eagle31.choice import Choice
from eagle31.errors import UserError
from train.config.evaluate import MAX_DRAFT_TOKENS
from train.config.setting import setting

# Weights start near 0.02 and those of norms at 1: one step of this size leaves nothing of them.
MAX_LR = 1.0


class Schedule(Choice):
    cosine = "cosine", "falls along half a cosine"
    linear = "linear", "falls linearly"
    wsd = "wsd", "warmup-stable-decay: stays at optim.lr and falls linearly in the last fifth of the steps"


class Optimizer(Choice):
    adamw = "adamw", "for all weights"
    muon = "muon", "for matrices; AdamW for norms and the draft head"


class Precision(Choice):
    fp32 = "fp32", "float32 throughout"
    bf16 = "bf16", "bfloat16 weights, with float32 master weights in the optimizer"


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: Optimizer = setting(Optimizer.muon, "Optimizer of the drafter's matrices.")
    lr: float | None = setting(
        None,
        "Peak learning rate of AdamW. null: 0.4 / hidden_size / sqrt(num_hidden_layers) of the drafter, for "
        "dspark 2.4 / hidden_size.",
        gt=0,
        lt=MAX_LR,
    )
    matrix_lr: float | None = setting(
        None,
        "Peak learning rate of the matrices under Muon. null: 0.03 / sqrt(num_hidden_layers) of the drafter.",
        gt=0,
        lt=MAX_LR,
    )
    schedule: Schedule = setting(Schedule.linear, "Course of the learning rate after the warm-up.")
    warmup_fraction: float = setting(0.015, "Fraction of the steps with a linear warm-up.", ge=0, lt=1)
    max_grad_norm: float = setting(0.5, "Norm to which gradients are clipped.", gt=0)


@dataclass
class DeepSpeedConfig:
    """How DeepSpeed holds the drafter's training state."""

    zero_stage: int = setting(
        1,
        "ZeRO stage: 0 keeps everything on each GPU; 1 splits the optimizer states, 2 the gradients too, "
        "3 the parameters too.",
        ge=0,
        le=3,
    )
    precision: Precision = setting(Precision.bf16, "Precision of the training step.")
    offload_optimizer: bool = setting(
        False, "Whether optimizer states are in CPU memory. Needs zero_stage 1, 2 or 3."
    )


@dataclass
class TrainConfig:
    """The training loop, in which samples are packed into rows of equal length."""

    ttt_steps: int = setting(
        II("evaluate.draft_tokens"),
        "Speculation steps that are rolled out in training (training-time test).",
        ge=1,
        le=MAX_DRAFT_TOKENS,
    )
    step_decay: float = setting(0.8, "Factor of the loss from one speculation step to the next.", gt=0, le=1)
    rollout_chunk: int | None = setting(
        None,
        "Supervised positions of a row that are rolled out at a time, for long rows: their activations are "
        "those of one chunk, and the hidden states stay in the CPU's memory. null: all.",
        ge=1,
    )
    max_drafts_per_row: int | None = setting(
        None,
        "Supervised positions of a row that are rolled out at most, sampled evenly. The loss of each counts "
        "for those left out, so its expectation is the same, and the time of a row is bounded. null: all.",
        ge=1,
    )
    row_ranks: int = setting(
        1,
        "Processes that share each row, for steps of few long rows. More than 1 needs rollout_chunk and a "
        "drafter of one layer.",
        ge=1,
    )
    row_tokens: int = setting(
        II("data.max_tokens"), "Length of a packed row in tokens; the longest sample must fit.", ge=1
    )
    rows_per_step: int = setting(8, "Packed rows of one optimizer step, over all ranks.", ge=1)
    max_steps: int | None = setting(None, "Number of optimizer steps. null: num_epochs decides.", ge=1)
    num_epochs: int = setting(1, "Passes over the training data if max_steps is null.", ge=1)
    log_every: int = setting(10, "Steps between two records in metrics.jsonl.", ge=1)
    validate_every: int | None = setting(
        None,
        "Steps between two validations, from which the best checkpoint is chosen. Each also records drift. "
        "null: a 20th of the run.",
        ge=1,
    )
    save_every: int | None = setting(
        None, "Steps between two checkpoints to resume from. null: a 50th of the run.", ge=1
    )
    keep_checkpoints: int = setting(3, "Number of checkpoints that are kept.", ge=1)
    continue_from: str | None = setting(
        None,
        "Training that this one continues, with its optimizer states, as DIRECTORY or DIRECTORY@STEP: the "
        "newest or the named checkpoint of the run with that output_dir, which may be this one's. null: it "
        "starts at the first step.",
    )
    seed: int | None = setting(
        None,
        "Seed of the drafter's first weights and of the order of the samples. null: that of the run, "
        "which also chooses the data.",
        ge=0,
        le=2**63 - 1,
    )


def check_deepspeed(deepspeed: DeepSpeedConfig) -> None:
    """Raise UserError for values, or combinations of them, that DeepSpeed does not take."""
    if deepspeed.offload_optimizer and deepspeed.zero_stage == 0:
        raise UserError("deepspeed.offload_optimizer", True, "It needs deepspeed.zero_stage of 1, 2 or 3.")
