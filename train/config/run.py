"""The recipe's schema. Hydra checks every key and type against it; `check` checks the values."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from data.capture.transport.spool import MEMORY
from eagle31.choice import Choice
from eagle31.cost.devices import computes_natively
from eagle31.errors import UserError
from train.config.capture import (
    CaptureConfig,
    CaptureMode,
    CaptureSource,
    TorchSpecConfig,
    check_capture,
)
from train.config.data import DataConfig, check_data
from train.config.drafter import DrafterShape
from train.config.evaluate import EvaluateConfig
from train.config.export import ExportConfig
from train.config.plan import PlanConfig
from train.config.setting import check_settings, setting
from train.config.target import TargetConfig, TargetEngine, check_target
from train.config.training import DeepSpeedConfig, OptimConfig, TrainConfig, check_deepspeed
from train.config.vllm import VllmConfig, check_vllm


class Stage(Choice):
    """The pipeline's stages, in the order in which they run."""

    plan = "plan", "prints sizes, memory and times; every run starts with it"
    data = "data", "reads conversations, holds prompts out, and tokenizes"
    vocab = "vocab", "builds the draft vocabulary"
    answers = "answers", "has the target answer the held-out prompts"
    capture = "capture", "captures the target's hidden states"
    train = "train", "trains the drafter"
    export = "export", "writes the checkpoint that vLLM loads"
    evaluate = "evaluate", "measures speculative decoding with the export"
    report = "report", "writes the report and the model card"


@dataclass
class RunConfig:
    """One run: `torchrun train/main.py recipe=NAME [key=value ...]`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    # Before those that follow evaluate.draft_tokens, so that its own name is in the message about a mistake.
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    drafter: DrafterShape = field(default_factory=DrafterShape)
    data: DataConfig = field(default_factory=DataConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    torchspec: TorchSpecConfig = field(default_factory=TorchSpecConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    recipe_name: str = setting(MISSING, "Name of the recipe, for reports. Set by recipe=NAME.")
    stages: list[Stage] = setting(list(Stage), "Stages to run. Finished ones are reused.")
    output_dir: str = setting(MISSING, "Directory of all results. Set to outputs/NAME by default.")
    artifacts_dir: str | None = setting(
        None,
        "Directory of the results of stages, named by what they depend on. Runs that share it reuse each "
        "other's. null: OUTPUT_DIR/artifacts, or that of the training to continue.",
    )
    seed: int = setting(0, "Seed of all random choices.", ge=0, le=2**63 - 1)
    stop_after_minutes: float | None = setting(
        None,
        "Minutes after which training saves and stops, with status 75; the same command resumes. null: a "
        "Slurm job stops before its time limit, and other runs do not.",
        gt=0,
    )


@cache
def register() -> None:
    """Register what recipes name: the schema, and how they depend on the machine at hand."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
    OmegaConf.register_new_resolver("machine_for", _machine)
    OmegaConf.register_new_resolver(
        "precision_at_hand", lambda: "bf16" if computes_natively(torch.bfloat16) else "fp32"
    )


def _machine(recipe: str) -> str:
    """Return the choice of recipes/machine for a command without one."""
    return "cpu" if recipe == "any_target" and not torch.cuda.is_available() else "gpus"


def check(config: RunConfig) -> None:
    """Refuse values that no stage could use, before any work.

    Raises:
        UserError: names the key, the value and the remedy.
    """
    check_settings(config)
    if not config.stages:
        raise UserError("stages", "[]", f"Choose from {[stage.value for stage in Stage]}.")
    check_target(config.target)
    drafter = config.drafter
    if drafter.init_revision is not None and drafter.init_from is None:
        raise UserError("drafter.init_revision", drafter.init_revision, "Give drafter.init_from too.")
    check_data(config.data)
    check_capture(config.capture)
    check_vllm(config.vllm)
    check_deepspeed(config.deepspeed)
    check_lengths(config)
    check_sharing(config)


def starts_vllm(config: RunConfig) -> bool:
    """Return whether a selected stage starts vLLM on this machine."""
    if drafts_in_vllm(config):
        return True
    return not config.vllm.servers and any(uses_servers(config, stage) for stage in config.stages)


def drafts_in_vllm(config: RunConfig) -> bool:
    """Return whether a selected stage evaluates the drafter in vLLM."""
    return config.target.engine is TargetEngine.vllm and Stage.evaluate in config.stages


def captures_in_vllm(config: RunConfig) -> bool:
    """Return whether a selected stage starts vLLM for hidden states; writing training data needs none."""
    captures = config.capture.source is CaptureSource.vllm and not config.vllm.servers
    return captures and any(uses_servers(config, one) for one in config.stages if one is not Stage.data)


def uses_servers(config: RunConfig, stage: Stage) -> bool:
    """Return whether a stage sends prompts to vLLM servers."""
    answers = config.target.engine is TargetEngine.vllm
    captures = config.capture.source is CaptureSource.vllm
    return {
        Stage.data: answers and config.data.regenerate.enabled,
        Stage.answers: answers,
        Stage.capture: captures,
        Stage.train: captures and config.capture.mode is CaptureMode.online,
    }.get(stage, False)


def uses_torchspec(config: RunConfig, stage: Stage) -> bool:
    """Return whether a stage has TorchSpec's engines capture."""
    captures = config.capture.source is CaptureSource.torchspec
    online = config.capture.mode is CaptureMode.online
    return captures and (stage is Stage.capture or (online and stage is Stage.train))


def states_directory(config: RunConfig) -> Path | None:
    """Return the directory in which states wait as files between vLLM and the run; None without any.

    Servers that the run starts are on the nodes of their ranks, and so is a server under a loopback
    address: their states wait in memory. Other servers and the ranks share the output directory.
    """
    capture = config.capture
    if capture.source is not CaptureSource.vllm:
        return None
    if capture.spool_dir is not None:
        return Path(capture.spool_dir).absolute()
    return Path(config.output_dir).absolute() / "spool" if config.vllm.remote_servers else MEMORY


def waiting_bytes(config: RunConfig) -> int:
    """Return the most bytes of states that wait between the target and the run on a node."""
    in_processes = config.capture.source is CaptureSource.hf
    return 0 if in_processes else int(config.capture.spool_gb * 1e9)


def training_seed(config: RunConfig) -> int:
    """Return the seed of the drafter's first weights and of the order of the training samples."""
    return config.seed if config.train.seed is None else config.train.seed


def needed_stages(config: RunConfig) -> list[Stage]:
    """Return the stages up to the last selected one whose results it depends on, in their order."""
    stages = list(Stage)
    return stages[: 1 + max(stages.index(stage) for stage in config.stages)]


def check_lengths(config: RunConfig) -> None:
    """Raise UserError for samples or completions that would not fit a packed row."""
    row_tokens = config.train.row_tokens
    if config.data.max_tokens > row_tokens:
        remedy = f"A sample must fit a row: lower it, or raise train.row_tokens ({row_tokens})."
        raise UserError("data.max_tokens", config.data.max_tokens, remedy)
    if config.evaluate.max_new_tokens >= row_tokens:
        remedy = f"Prompt and completion must fit a row: lower it, or raise train.row_tokens ({row_tokens})."
        raise UserError("evaluate.max_new_tokens", config.evaluate.max_new_tokens, remedy)
    longest, k = config.evaluate.max_new_tokens, config.evaluate.draft_tokens
    if k >= longest:
        remedy = f"A draft must fit a completion: lower it, or raise evaluate.max_new_tokens ({longest})."
        raise UserError("evaluate.draft_tokens", k, remedy)


def check_sharing(config: RunConfig) -> None:
    """Raise UserError for rows that processes cannot share."""
    train, num_layers = config.train, config.drafter.num_hidden_layers
    if train.row_ranks == 1:
        return
    if train.rollout_chunk is None:
        remedy = "Only rows in chunks can be shared; give train.rollout_chunk, such as 4096."
        raise UserError("train.row_ranks", train.row_ranks, remedy)
    if num_layers > 1:
        remedy = f"With drafter.num_hidden_layers={num_layers}, keys depend on the rows before them; give 1."
        raise UserError("train.row_ranks", train.row_ranks, remedy)
