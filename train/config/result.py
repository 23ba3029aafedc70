"""The recipe's schema for what happens with a trained drafter: export, evaluation, push."""

from dataclasses import dataclass
from enum import Enum

from eagle31.export.layouts import Layout


class ExportDtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


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
