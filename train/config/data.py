"""The recipe's schema for the training data."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from data.text.template import Turns
from data.text.tokenize import Overlong


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
