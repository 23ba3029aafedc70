"""The recipe's schema for metrics."""

from dataclasses import dataclass
from enum import Enum


class TrackingMode(Enum):
    """Whether Weights & Biases gets the metrics; metrics.jsonl is written in every mode."""

    auto = "auto"  # online if a W&B key is configured, offline otherwise
    online = "online"  # sent while training
    offline = "offline"  # kept in the output directory, for `wandb sync`
    disabled = "disabled"  # no W&B


@dataclass
class TrackingConfig:
    """Metrics in Weights & Biases, in addition to metrics.jsonl in the output directory."""

    mode: TrackingMode = TrackingMode.auto  # Whether W&B gets the metrics.
    project: str = "eagle31"  # W&B project.
    name: str | None = None  # Name of the W&B run. null: the recipe's name.
