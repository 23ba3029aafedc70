"""The recipe's schema for the optimizer, DeepSpeed, the training loop and its metrics."""

import math
from dataclasses import dataclass, field
from enum import Enum

from data.batches.position_gaps import PositionGaps
from data.batches.row_schedule import RowSchedule
from eagle31.errors import UserError, require_positive
from eagle31.training.objectives import Loss, Objective, StepWeights

# Weights start near 0.02 and those of norms at 1: one step of this size leaves nothing of them.
MAX_LR = 1.0


# Values of train.continue_from that name no directory.
AUTO, NONE = "auto", "none"


class Schedule(Enum):
    cosine = "cosine"  # falls along half a cosine
    linear = "linear"  # falls linearly
    constant = "constant"  # stays at optim.lr
    wsd = "wsd"  # warmup-stable-decay: stays at optim.lr and falls at the end, see optim.decay_fraction


class DecayShape(Enum):
    linear = "linear"  # falls linearly
    cosine = "cosine"  # falls along half a cosine
    sqrt = "sqrt"  # falls as one minus the square root of the progress: fast first, slowly towards the end


class Optimizer(Enum):
    adamw = "adamw"  # for all weights
    muon = "muon"  # for matrices; AdamW for norms and the draft head


class Precision(Enum):
    fp32 = "fp32"  # float32 throughout
    bf16 = "bf16"  # bfloat16 weights, with float32 master weights in the optimizer


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: Optimizer = Optimizer.muon  # Optimizer of the drafter's matrices.
    # Peak learning rate of AdamW. null: 0.4 / hidden_size / sqrt(num_hidden_layers) of the drafter.
    lr: float | None = None
    # Peak learning rate of the matrices under Muon. null: 0.03 / sqrt(num_hidden_layers) of the drafter.
    matrix_lr: float | None = None
    momentum: float = 0.95  # Decay rate of Muon's moving average of gradients, in [0, 1).
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # Adam's two decay rates, in [0, 1).
    eps: float = 1e-8  # Adam's epsilon.
    weight_decay: float = 0.0  # Decoupled weight decay.
    schedule: Schedule = Schedule.cosine  # Course of the learning rate after the warm-up.
    warmup_fraction: float = 0.015  # Fraction of the steps with a linear warm-up, in [0, 1).
    # Number of steps with a linear warm-up. null: warmup_fraction decides.
    warmup_steps: int | None = None
    # Fraction of the steps in which the learning rate falls, with schedule=wsd, in (0, 1]. A continued
    # training falls from the step that it continues from at the earliest.
    decay_fraction: float = 0.2
    # Course of that fall. No ablation supports the default.
    decay_shape: DecayShape = DecayShape.linear
    min_lr_fraction: float = 0.0  # Final learning rate as a fraction of the peak, in [0, 1].
    # Fraction of the steps at the start in which the draft head keeps its first weights, in [0, 1); 0: it is
    # trained from the first step. A continued training trains it throughout. No ablation supports it yet.
    head_start_fraction: float = 0.0
    max_grad_norm: float = 0.5  # Norm to which gradients are clipped.
    # A step whose gradient norm is more than this many times the average of the steps before is skipped.
    # null: only steps whose loss or gradient is not finite are. The default tells a diverged run from a hard
    # batch, which clipping takes care of: sound runs stayed below 2 times the average, and a run with a rate
    # of 0.9 went beyond 400 times. No ablation supports the exact value.
    max_norm_jump: float | None = 100.0
    # The run ends with an error after this many skipped steps in a row. No ablation supports the default.
    max_skipped_steps: int = 10


@dataclass
class DeepSpeedConfig:
    """How DeepSpeed holds the drafter's training state."""

    # ZeRO stage: 0 keeps everything on each GPU; 1 splits the optimizer states, 2 the gradients too, 3 the
    # parameters too.
    zero_stage: int = 0
    precision: Precision = Precision.bf16  # Precision of the training step.
    offload_optimizer: bool = False  # Whether optimizer states are in CPU memory. Needs zero_stage 1, 2 or 3.
    offload_parameters: bool = False  # Whether parameters are in CPU memory. Needs zero_stage 3.
    # Minutes that a rank may hold up a collective operation of the others, before it fails and the run ends.
    # The default is longer than a checkpoint to a slow disk or the start of a server again takes.
    timeout_minutes: float = 30.0


@dataclass
class TrainConfig:
    """The training loop, in which samples are packed into rows of equal length."""

    ttt_steps: int = 7  # Speculation steps that are rolled out in training (training-time test), 64 at most.
    # Fraction of the optimizer steps at the start over which the rolled out speculation steps grow from 1 to
    # ttt_steps, in [0, 1]; 0: all of them from the first step. The early steps then cost less. No ablation
    # supports it yet.
    ttt_curriculum_fraction: float = 0.0
    step_decay: float = 0.8  # Factor of the loss from one speculation step to the next, in (0, 1].
    # Weight of a speculation step in the loss. decay: step_decay^k. reach: the probability that serving
    # reaches the draft, which is the product of the acceptance rates of the drafts before it, as they are
    # now. No ablation supports reach yet.
    step_weights: StepWeights = StepWeights.decay
    # With step_weights=reach an acceptance rate a counts as (1 - s) a + s, so that later drafts are trained
    # before the ones before them are accepted; s in [0, 1], and 1 weighs all drafts alike. No ablation
    # supports the default.
    reach_smoothing: float = 0.0
    # Loss of a draft against the target's distribution. acceptance_length minimizes what the expected number
    # of accepted drafts lacks of all; no ablation supports it yet.
    loss: Loss = Loss.kl
    # How early loss=lk_lambda and loss=acceptance_length turn from KL to the acceptance rate, as that of each
    # draft grows; larger is earlier. 0 stays KL; 1e9 is without KL from the start, where it learns little.
    lk_eta: float = 3.0
    # Whether drafts are supervised where the target's greedy token is outside the draft vocabulary.
    count_outside_vocab: bool = True
    # Whether torch.compile makes one kernel of each chain of memory-bound operations: rotary embedding,
    # SwiGLU and merging attention. It needs Triton on a GPU and a C++ compiler on a CPU, and takes minutes
    # at the start. Off, because its gain has not been measured on a GPU; scripts/gpu_check measures it.
    compile: bool = False
    # Whether activations are recomputed in the backward pass: less memory for very long rows, about a sixth
    # more compute.
    activation_checkpointing: bool = False
    # Fraction of the samples whose positions jump once by a random number of tokens, so that the drafter
    # meets longer distances than the samples have. docs/study.md has an ablation.
    position_gap_probability: float = 0.0
    position_gap_tokens: int = 2048  # The longest jump; shorter ones are as likely.
    row_tokens: int = 2048  # Length of a packed row in tokens; the longest sample must fit.
    # Shuffle within windows of this many tokens instead of over all samples: files of the store are joined
    # in random order, so that a file is read during one window only. For capture.mode=offline with stores
    # that are slow to read at random (docs/capture.md). No ablation compares the two. null: over all samples.
    shuffle_window_tokens: int | None = None
    rows_per_step: int = 8  # Packed rows of one optimizer step, over all ranks.
    # Packed rows of the first optimizer steps, over all ranks; the number doubles until it is rows_per_step.
    # null: every step has rows_per_step. No ablation supports it yet.
    rows_per_step_start: int | None = None
    # Fraction of the optimizer steps at the start that have fewer than rows_per_step, in (0, 1), where
    # rows_per_step_start is given. A continued training has rows_per_step throughout. No ablation supports
    # the default.
    rows_growth_fraction: float = 0.25
    max_steps: int | None = None  # Number of optimizer steps. null: num_epochs decides.
    num_epochs: int = 1  # Passes over the training data if max_steps is null.
    # Decay rate of an exponential moving average of the weights, such as 0.99 for some hundred steps, in
    # (0, 1). The average is validated, kept and exported in place of the weights. null: none.
    ema_decay: float | None = None
    log_every: int = 10  # Steps between two records in metrics.jsonl.
    validate_every: int = 200  # Steps between two validations, from which the best checkpoint is chosen.
    # Training ends after this many validations in a row that are not better than the best one. The learning
    # rate follows its schedule for all steps until then. null: training never ends early.
    early_stop_validations: int | None = None
    # Steps between two records of drift in metrics.jsonl; there is one before the first step and after the
    # last step too. Each takes less time than a step. 0: none.
    diagnose_every: int = 50
    save_every: int = 200  # Steps between two checkpoints to resume from.
    keep_checkpoints: int = 3  # Number of checkpoints that are kept.
    # Training that this one continues, with its optimizer states. auto: that in output_dir, when its settings
    # have changed or its steps are more. none: no other; it starts at the first step. DIRECTORY or
    # DIRECTORY@STEP: the newest or the named checkpoint of the run with that output_dir.
    continue_from: str = AUTO
    # Steps between two copies of the weights in checkpoints/weights, which all stay, for example for a curve
    # of acceptance length; the last step's are among them. null: none.
    keep_weights_every: int | None = None
    # Seed of the drafter's first weights and of the order of the samples. null: that of the run, which also
    # chooses the data.
    seed: int | None = None


@dataclass
class TrackingConfig:
    """Metrics in Weights & Biases, if it has a key, in addition to metrics.jsonl in the output directory.

    W&B's variable `WANDB_MODE` can be `offline`, for `wandb sync`, or `disabled`.
    """

    project: str = "eagle31"  # W&B project.
    name: str | None = None  # Name of the W&B run. null: the recipe's name.


def check_optim(optim: OptimConfig) -> None:
    """Raise UserError for values that the optimizer could not use."""
    positive = ("lr", "matrix_lr", "eps", "max_grad_norm", "max_norm_jump", "max_skipped_steps")
    require_positive({f"optim.{name}": getattr(optim, name) for name in positive})
    if optim.lr is not None and optim.lr >= MAX_LR:
        remedy = f"AdamW moves every weight by about lr in each step; give less than {MAX_LR:g}."
        raise UserError("optim.lr", optim.lr, remedy)
    if optim.matrix_lr is not None and optim.matrix_lr >= MAX_LR:
        remedy = f"Muon changes a matrix by about matrix_lr in spectral norm; give less than {MAX_LR:g}."
        raise UserError("optim.matrix_lr", optim.matrix_lr, remedy)
    if not 0 <= optim.momentum < 1:
        raise UserError("optim.momentum", optim.momentum, "It must be in [0, 1).")
    if not optim.weight_decay >= 0:
        raise UserError("optim.weight_decay", optim.weight_decay, "It must not be negative.")
    if not 0 <= optim.min_lr_fraction <= 1:
        raise UserError("optim.min_lr_fraction", optim.min_lr_fraction, "It must be in [0, 1].")
    if not 0 < optim.decay_fraction <= 1:
        raise UserError("optim.decay_fraction", optim.decay_fraction, "It must be in (0, 1].")
    if optim.warmup_steps is not None and optim.warmup_steps < 0:
        raise UserError("optim.warmup_steps", optim.warmup_steps, "It must not be negative.")
    for name in ("warmup_fraction", "head_start_fraction"):
        if not 0 <= getattr(optim, name) < 1:
            raise UserError(f"optim.{name}", getattr(optim, name), "It must be in [0, 1).")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise UserError("optim.betas", optim.betas, "Give two values in [0, 1), such as [0.9,0.95].")


def check_deepspeed(deepspeed: DeepSpeedConfig) -> None:
    """Raise UserError for values, or combinations of them, that DeepSpeed does not take."""
    if deepspeed.zero_stage not in (0, 1, 2, 3):
        raise UserError("deepspeed.zero_stage", deepspeed.zero_stage, "Choose 0, 1, 2 or 3.")
    if deepspeed.offload_optimizer and deepspeed.zero_stage == 0:
        raise UserError("deepspeed.offload_optimizer", True, "It needs deepspeed.zero_stage of 1, 2 or 3.")
    if deepspeed.offload_parameters and deepspeed.zero_stage != 3:
        raise UserError("deepspeed.offload_parameters", True, "It needs deepspeed.zero_stage=3.")
    require_positive({"deepspeed.timeout_minutes": deepspeed.timeout_minutes})


def check_train(train: TrainConfig, *, pruned: bool) -> None:
    """Raise UserError for values that the training loop could not use.

    Args:
        pruned: whether the draft vocabulary is smaller than the target's.
    """
    counts = ("ttt_steps", "row_tokens", "rows_per_step", "num_epochs", "position_gap_tokens")
    intervals = ("log_every", "validate_every", "save_every", "keep_checkpoints", "keep_weights_every")
    positive = (*counts, *intervals, "early_stop_validations", "shuffle_window_tokens")
    require_positive({f"train.{name}": getattr(train, name) for name in positive})
    for name in ("lk_eta", "diagnose_every"):
        if not getattr(train, name) >= 0:
            raise UserError(f"train.{name}", getattr(train, name), "It must not be negative.")
    if train.max_steps is not None and train.max_steps < 1:
        raise UserError("train.max_steps", train.max_steps, "Give at least 1, or null for num_epochs.")
    if train.ema_decay is not None and not 0 < train.ema_decay < 1:
        raise UserError("train.ema_decay", train.ema_decay, "It must be in (0, 1), or null for no average.")
    if not 0 < train.step_decay <= 1:
        raise UserError("train.step_decay", train.step_decay, "It must be in (0, 1].")
    if train.rows_per_step_start is not None and not 0 < train.rows_per_step_start <= train.rows_per_step:
        remedy = f"It must be from 1 to train.rows_per_step ({train.rows_per_step}), or null."
        raise UserError("train.rows_per_step_start", train.rows_per_step_start, remedy)
    if not 0 < train.rows_growth_fraction < 1:
        raise UserError("train.rows_growth_fraction", train.rows_growth_fraction, "It must be in (0, 1).")
    for name in ("reach_smoothing", "ttt_curriculum_fraction", "position_gap_probability"):
        if not 0 <= getattr(train, name) <= 1:
            raise UserError(f"train.{name}", getattr(train, name), "It must be in [0, 1].")
    objective_of(train).check(pruned=pruned)


def row_schedule_of(train: TrainConfig, max_steps: int) -> RowSchedule:
    """Return the rows of each optimizer step of a run that continues no other one."""
    growth_steps = math.ceil(train.rows_growth_fraction * max_steps)
    return RowSchedule(train.rows_per_step, train.rows_per_step_start, growth_steps)


def position_gaps_of(train: TrainConfig, seed: int) -> PositionGaps | None:
    """Return the gaps in the samples' positions, or None if there are none."""
    if not train.position_gap_probability:
        return None
    return PositionGaps(train.position_gap_probability, train.position_gap_tokens, seed)


def objective_of(train: TrainConfig) -> Objective:
    """Return the loss that the recipe chooses."""
    return Objective(
        train.loss, train.lk_eta, train.count_outside_vocab, train.step_weights, train.reach_smoothing
    )
