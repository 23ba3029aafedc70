"""The recipe's schema for a trained drafter's export, and for its push to the Hugging Face Hub."""

from dataclasses import dataclass
from enum import Enum

from eagle31.export.layouts import Layout


class ExportDtype(Enum):
    float32 = "float32"  # exact, twice the size
    bfloat16 = "bfloat16"  # what vLLM usually serves


@dataclass
class ExportConfig:
    """The checkpoint that vLLM loads."""

    dtype: ExportDtype = ExportDtype.bfloat16  # Precision of the exported weights.
    layout: Layout = Layout.vllm  # Which config.json is written.
    # Whether the averaged weights are exported, if train.ema_decay is set, or those of the same step before
    # averaging.
    averaged: bool = True


@dataclass
class HubConfig:
    """The repository that the export is pushed to; HF_TOKEN in the environment holds the access token."""

    repo_id: str | None = None  # Repository as OWNER/NAME. null: nothing is pushed.
    private: bool = True  # Whether a repository that the push creates is private.
    base_model: str | None = None  # Hub id of the target if target.model is a local copy of it.
    license: str | None = None  # License identifier of the Hub, such as apache-2.0. null: none is stated.
