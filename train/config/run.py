"""The recipe's schema. Hydra checks every key and type against it; `check` checks the values."""

from dataclasses import dataclass, field
from enum import Enum

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from eagle31.errors import UserError
from eagle31.training.objectives import Objective
from train.config.capture import CaptureConfig, check_capture
from train.config.data import DataConfig
from train.config.drafter import DrafterShape
from train.config.launcher import LauncherConfig, check_launcher
from train.config.planning import PlanConfig
from train.config.result import EvaluateConfig, ExportConfig, HubConfig
from train.config.target import TargetConfig, TargetEngine
from train.config.tracking import TrackingConfig
from train.config.training import DeepSpeedConfig, OptimConfig, TrainConfig
from train.config.vllm import MAX_TEMPERATURE, VllmConfig, check_vllm


class Stage(Enum):
    """The pipeline's stages, in the order in which they run."""

    plan = "plan"  # sizes and times; every run starts with it
    data = "data"  # read, hold out, [regenerate,] render, tokenize
    vocab = "vocab"  # the draft vocabulary
    answers = "answers"  # the target answers the held-out prompts
    capture = "capture"  # the target's hidden states
    train = "train"
    export = "export"
    evaluate = "evaluate"
    report = "report"
    push = "push"  # to the Hugging Face Hub


@dataclass
class RunConfig:
    """One run: `torchrun train/main.py recipe=NAME [key=value ...]`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterShape = field(default_factory=DrafterShape)
    data: DataConfig = field(default_factory=DataConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    recipe_name: str = MISSING
    stages: list[Stage] = field(default_factory=lambda: list(Stage))
    output_dir: str = MISSING
    cache_dir: str = MISSING
    seed: int = 0


def register() -> None:
    """Puts the schema where `recipes/train.yaml` finds it."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)


def check(config: RunConfig) -> None:
    """Refuses values that no stage could use, before any work.

    Raises:
        UserError: names the key, the value and the remedy.
    """
    positive = {
        "data.max_tokens": config.data.max_tokens,
        "data.num_validation": config.data.num_validation,
        "data.num_test": config.data.num_test,
        "train.ttt_steps": config.train.ttt_steps,
        "train.row_tokens": config.train.row_tokens,
        "train.rows_per_step": config.train.rows_per_step,
        "train.num_epochs": config.train.num_epochs,
        "train.log_every": config.train.log_every,
        "train.validate_every": config.train.validate_every,
        "train.save_every": config.train.save_every,
        "train.keep_checkpoints": config.train.keep_checkpoints,
        "evaluate.draft_tokens": config.evaluate.draft_tokens,
        "evaluate.max_new_tokens": config.evaluate.max_new_tokens,
        "optim.lr": config.optim.lr,
        "optim.max_grad_norm": config.optim.max_grad_norm,
        "optim.eps": config.optim.eps,
        "data.regenerate.max_new_tokens": config.data.regenerate.max_new_tokens,
        "data.regenerate.batch_size": config.data.regenerate.batch_size,
    }
    for name, value in positive.items():
        if not value > 0:
            raise UserError(name, value, "It must be greater than 0.")
    for name, value in vars(config.plan).items():
        if value is not None and not value > 0:
            raise UserError(f"plan.{name}", value, "It must be greater than 0.")
    if config.target.checkpoint_gb is not None and not config.target.checkpoint_gb > 0:
        raise UserError("target.checkpoint_gb", config.target.checkpoint_gb, "It must be greater than 0.")
    fractions = {
        "plan.assistant_fraction": config.plan.assistant_fraction,
        "optim.min_lr_fraction": config.optim.min_lr_fraction,
        "data.max_malformed_fraction": config.data.max_malformed_fraction,
    }
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise UserError(name, value, "It must lie in [0, 1].")
    not_negative = {
        "train.lk_eta": config.train.lk_eta,
        "optim.weight_decay": config.optim.weight_decay,
        "data.regenerate.temperature": config.data.regenerate.temperature,
    }
    for name, value in not_negative.items():
        if not value >= 0:
            raise UserError(name, value, "It must not be negative.")
    if config.data.num_workers is not None and config.data.num_workers < 1:
        raise UserError("data.num_workers", config.data.num_workers, "Give at least 1; null takes all cores.")
    if config.evaluate.max_new_tokens >= config.train.row_tokens:
        raise UserError(
            "evaluate.max_new_tokens",
            config.evaluate.max_new_tokens,
            f"Prompt and answer must fit a row: lower it, or raise train.row_tokens "
            f"({config.train.row_tokens}).",
        )
    if config.train.max_steps is not None and config.train.max_steps < 1:
        raise UserError("train.max_steps", config.train.max_steps, "Give at least 1, or null for num_epochs.")
    if not 0 < config.train.step_decay <= 1:
        raise UserError("train.step_decay", config.train.step_decay, "It must lie in (0, 1].")
    Objective(config.train.loss).check(pruned=config.drafter.draft_vocab_size is not None)
    if config.data.max_tokens > config.train.row_tokens:
        raise UserError(
            "data.max_tokens",
            config.data.max_tokens,
            f"A sample must fit a row: lower it, or raise train.row_tokens ({config.train.row_tokens}).",
        )
    if config.deepspeed.zero_stage not in (0, 1, 2, 3):
        raise UserError("deepspeed.zero_stage", config.deepspeed.zero_stage, "Choose 0, 1, 2 or 3.")
    if config.deepspeed.offload_optimizer and config.deepspeed.zero_stage == 0:
        raise UserError("deepspeed.offload_optimizer", True, "It needs deepspeed.zero_stage of 1, 2 or 3.")
    if config.deepspeed.offload_parameters and config.deepspeed.zero_stage != 3:
        raise UserError("deepspeed.offload_parameters", True, "It needs deepspeed.zero_stage=3.")
    if not 0 <= config.optim.warmup_fraction < 1:
        raise UserError("optim.warmup_fraction", config.optim.warmup_fraction, "It must lie in [0, 1).")
    if len(config.optim.betas) != 2 or not all(0 <= beta < 1 for beta in config.optim.betas):
        raise UserError("optim.betas", config.optim.betas, "Give two values in [0, 1), such as [0.9,0.95].")
    if config.evaluate.temperature <= 0:
        raise UserError("evaluate.temperature", config.evaluate.temperature, "Use evaluate.sampling=false.")
    if config.drafter.init_revision is not None and config.drafter.init_from is None:
        raise UserError("drafter.init_revision", config.drafter.init_revision, "Give drafter.init_from too.")
    check_capture(config.capture)
    check_vllm(config.vllm)
    check_launcher(config.launcher)
    if config.target.engine is TargetEngine.vllm:
        drawn = {
            "evaluate.temperature": config.evaluate.temperature,
            "data.regenerate.temperature": config.data.regenerate.temperature,
        }
        for name, value in drawn.items():
            if value > MAX_TEMPERATURE:
                remedy = f"vLLM takes up to {MAX_TEMPERATURE}; lower it, or set target.engine=hf."
                raise UserError(name, value, remedy)
    if not config.stages:
        raise UserError("stages", "[]", f"Choose from {[stage.value for stage in Stage]}.")
