"""The recipe's schema for a trained drafter's export, and for its push to the Hugging Face Hub."""

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


@dataclass
class HubConfig:
    """The repository that the export is pushed to; the access token is that of `hf auth login`, or HF_TOKEN.

    scripts/push_to_hub also states a license, and the target's Hub id where target.model is a local copy.
    """

    repo_id: str | None = setting(None, "Repository as OWNER/NAME. null: nothing is pushed.")
    private: bool = setting(True, "Whether a repository that the push creates is private.")
