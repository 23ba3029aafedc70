"""The recipe's schema. Hydra checks every key and type against it; `check` checks the values."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from data.text.template import Turns
from data.text.tokenize import Overlong
from eagle31.errors import UserError
from eagle31.export.layouts import Layout
from eagle31.training.objectives import Loss, Objective
from train.capture_config import CaptureConfig, check_capture
from train.launcher_config import LauncherConfig, check_launcher
from train.tracking import TrackingMode
from train.vllm_config import MAX_TEMPERATURE, VllmConfig, check_vllm


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


class TargetEngine(Enum):
    """What runs the target where its answers are wanted; `capture.source` says what captures its states."""

    hf = "hf"  # transformers, on the devices of rank 0
    vllm = "vllm"  # an engine of the run's own, or servers: for targets that transformers cannot hold


class Attention(Enum):
    gqa = "gqa"
    mla = "mla"


class Schedule(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class ExportDtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class TargetConfig:
    """The frozen model that will be served."""

    model: str = MISSING  # path, hub id, or "embedded"
    revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    engine: TargetEngine = TargetEngine.hf  # writes answers, and is what the drafter is evaluated in
    device_map: str | None = None  # "auto": accelerate spreads it over this node's devices
    layers_path: str | None = None  # where a wrapper hides the decoder layers
    norm_path: str | None = None
    embed_path: str | None = None
    lm_head_path: str | None = None
    chat_template: str | None = None  # a Jinja file in place of the tokenizer's own
    # Of its config.json what a plan needs where that file is not at hand; checked against it where it is.
    architecture: dict[str, Any] = field(default_factory=dict)
    checkpoint_gb: float | None = None  # size of its weights; null: the parameters in the config's dtype


@dataclass
class DrafterShape:
    """null takes the value of the checkpoint to start from, or the target's."""

    attention: Attention | None = None  # null: the checkpoint's, else gqa, whatever the target has

    init_from: str | None = None  # a published or exported drafter: directory or hub id
    init_revision: str | None = None

    num_hidden_layers: int = 1
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # of gqa
    q_lora_rank: int | None = None  # of mla, as the next four
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rms_norm_eps: float | None = None
    # rope_type, rope_theta and the scaling's keys; empty takes the target's (Hydra sets no key below null)
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int | None = None
    aux_layer_ids: list[int] | None = None  # decoder layers already applied; null: 2, n // 2, n - 3
    draft_vocab_size: int | None = None  # null: the target's whole vocabulary
    # They overrule the checkpoint to start from: EAGLE 3 goes on as 3.1 with fc_norm weights of one.
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    train_lm_head: bool = True


@dataclass
class RegenerateConfig:
    """The target writes the assistant turns itself."""

    enabled: bool = False
    max_new_tokens: int = 512
    temperature: float = 0.0
    batch_size: int = 16  # of target.engine=hf; vLLM batches by itself


@dataclass
class DataConfig:
    train: str = MISSING  # file, hub id, or "embedded"
    eval: str | None = None  # prompts kept apart; null holds some of `train` out
    subset: str | None = None  # of a hub data set that has several, such as gsm8k's "main"
    split: str = "train"
    eval_split: str = "test"
    prompt_column: str | None = None
    response_column: str | None = None
    turns: Turns = Turns.all
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 2048
    overlong: Overlong = Overlong.cut
    max_malformed_fraction: float = 0.01
    num_workers: int | None = None  # null: the cores of this node
    num_validation: int = 32  # held-out prompts that choose the checkpoint
    num_test: int = 32  # held-out prompts that the final figures come from
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)


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


@dataclass
class ExportConfig:
    dtype: ExportDtype = ExportDtype.bfloat16
    layout: Layout = Layout.vllm  # speculators: a bare `vllm serve EXPORT` works


@dataclass
class EvaluateConfig:
    draft_tokens: int = 4  # k, draft length
    max_new_tokens: int = 256
    temperature: float = 1.0  # of the sampling run
    sampling: bool = True
    untrained: bool = True  # also measures a drafter that was never trained


@dataclass
class HubConfig:
    """Where the export is pushed; the token is read from HF_TOKEN alone."""

    repo_id: str | None = None  # owner/name; null: nothing is pushed
    private: bool = True
    base_model: str | None = None  # the target's id on the Hub, when target.model is a local copy of it
    license: str | None = None  # an identifier of the Hub's, such as apache-2.0


@dataclass
class PlanConfig:
    """What the plan cannot know by itself."""

    num_tokens: int | None = None  # of the training data, as long as it is not tokenised
    document_tokens: int | None = None  # a sample's mean length; null: data.max_tokens
    assistant_fraction: float = 0.5  # of the tokens
    num_gpus: int | None = None  # that train; null: the processes of this run
    target_gpus: int | None = None  # that run the target; null: the ones that train
    gpu_memory_gb: float | None = None  # null: that of this machine's GPU
    tflops_per_gpu: float | None = None  # reached, not the data sheet's; null: what an earlier run measured


@dataclass
class TrackingConfig:
    mode: TrackingMode = TrackingMode.auto
    project: str = "eagle31"
    name: str | None = None


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
