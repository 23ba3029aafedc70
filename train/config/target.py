"""The recipe's schema for the target."""

import re
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from eagle31.choice import Choice
from eagle31.errors import UserError
from train.config.setting import setting

# What accelerate takes for device_map: ways to spread a model, and names of devices.
_DEVICE_MAP = re.compile(r"auto|balanced|balanced_low_0|sequential|(cpu|cuda|xpu|mps|npu|hpu)(:\d+)?")

EMBEDDED = "embedded"  # target.model and data.train: a small model and its text, made on this machine


class TargetEngine(Choice):
    """The engine that writes the target's completions; capture.source chooses the one that captures."""

    hf = "hf", "transformers; regenerates on the GPUs of all nodes, and does the rest on those of the first"
    vllm = "vllm", "vLLM, for targets that transformers cannot hold"


@dataclass
class TargetConfig:
    """The frozen model that the drafter is trained for."""

    model: str = setting(
        MISSING,
        'Directory or Hub id of the model. "embedded": a small model, trained on this machine at first use.',
    )
    revision: str | None = setting(None, "Branch, tag or commit on the Hub. null: the default branch.")
    dtype: str = setting(
        "auto",
        "Name of the torch dtype, such as bfloat16, in which every engine computes the target: for answers, "
        "capture and evaluation. auto: the checkpoint's dtype, or float32 on a CPU that has no instructions "
        "for it.",
    )
    trust_remote_code: bool = setting(False, "Whether to run Python code that comes with the model.")
    attn_implementation: str | None = setting(
        None, "Attention in transformers, such as sdpa. null: its default."
    )
    engine: TargetEngine = setting(
        TargetEngine.hf,
        "Engine that answers held-out prompts, regenerates training data and evaluates the drafter.",
    )
    device_map: str | None = setting(
        None,
        '"auto" spreads the model over this node\'s devices with accelerate. null: a copy on each device. '
        "For transformers only.",
    )
    chat_template: str | None = setting(
        None, "Path of a Jinja chat template. null: the tokenizer's template."
    )
    architecture: dict[str, Any] = setting(
        {},
        "Keys of the model's config.json that differ from transformers' defaults. A plan is made from them "
        "while the model is not on this machine.",
    )
    checkpoint_gb: float | None = setting(
        None,
        "Size of the model's weights in 10^9 bytes, for the plan. null: computed from its parameters and "
        "dtype.",
        gt=0,
    )


def check_target(target: TargetConfig) -> None:
    """Raise UserError for values that no stage could use."""
    if target.device_map is not None and not _DEVICE_MAP.fullmatch(target.device_map):
        remedy = "Give auto, a device such as cuda:0, or null for a copy on each device."
        raise UserError("target.device_map", target.device_map, remedy)
