"""The recipe's schema for a trained drafter's export."""

from dataclasses import dataclass

from eagle31.choice import Choice
from eagle31.export.layouts import Layout
from train.config.setting import setting


class ExportDtype(Choice):
    float32 = "float32", "exact, twice the size"
    bfloat16 = "bfloat16", "what vLLM usually serves"


@dataclass
class ExportConfig:
    """The checkpoint that vLLM loads."""

    dtype: ExportDtype = setting(ExportDtype.bfloat16, "Precision of the exported weights.")
    layout: Layout = setting(Layout.vllm, "Which config.json is written.")
