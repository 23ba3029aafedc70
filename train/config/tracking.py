"""The recipe's schema for metrics."""

from dataclasses import dataclass
from enum import Enum


class TrackingMode(Enum):
    """What W&B does; metrics.jsonl is written in every mode."""

    auto = "auto"  # online when a key is configured, offline otherwise
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class TrackingConfig:
    mode: TrackingMode = TrackingMode.auto
    project: str = "eagle31"
    name: str | None = None
