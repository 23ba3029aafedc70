"""The recipe's schema for the target."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

EMBEDDED = "embedded"  # target.model and data.train: a small model and its text, made on this machine


class TargetEngine(Enum):
    """What runs the target where its answers are wanted; `capture.source` says what captures its states."""

    hf = "hf"  # transformers, on the devices of rank 0
    vllm = "vllm"  # an engine of the run's own, or servers: for targets that transformers cannot hold


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
