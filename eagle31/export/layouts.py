"""The layouts in which EAGLE-3 drafters are published: their keys, their tensor names, their files."""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle31.errors import UserError
from eagle31.model.config import DrafterConfig
from eagle31.tensor_files import load_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

IDS = "eagle_aux_hidden_state_layer_ids"


class Layout(Enum):
    """The layout of an export's files."""

    vllm = "vllm"  # the drafter's config.json: `--speculative-config` names export and method
    speculators = "speculators"  # config.json names the target too: `vllm serve EXPORT` is enough


@dataclass(frozen=True)
class Verifier:
    """What a speculators checkpoint says about how it is served."""

    name_or_path: str  # the target
    architectures: tuple[str, ...]
    draft_tokens: int


def check_layout(config: DrafterConfig, layout: Layout) -> None:
    """Raise UserError when vLLM does not read this layout for this drafter."""
    if config.mla is not None and layout is Layout.speculators:
        remedy = "vLLM reads this layout only for grouped-query attention; use export.layout=vllm."
        raise UserError("export.layout", layout.value, remedy)


def layout_of(raw: dict[str, Any]) -> Layout:
    """Return the layout of a parsed config.json."""
    is_speculators = "speculators_config" in raw or "speculators_model_type" in raw
    return Layout.speculators if is_speculators else Layout.vllm


def layer_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the drafter's keys as vLLM reads them: speculators' top level overrides some of the layer's.

    Raises:
        UserError: a speculators checkpoint has another algorithm, or no layer config.
    """
    if layout_of(raw) is Layout.vllm:
        return raw
    if raw.get("speculators_model_type") != "eagle3":
        remedy = "Only eagle3 drafters are supported."
        raise UserError("speculators_model_type", raw.get("speculators_model_type"), remedy)
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError("transformer_layer_config", layer, "config.json does not have the layer's shape.")
    taken = {key: raw[key] for key in ("target_hidden_size", IDS) if raw.get(key)}
    return layer | {
        **taken,
        "draft_vocab_size": raw.get("draft_vocab_size"),
        "norm_before_residual": raw.get("norm_before_residual", True),
        "norm_before_fc": raw.get("norm_before_fc", False),
        "fc_norm": raw.get("fc_norm", False),
        "norm_output": raw.get("norm_output", False),
    }


def served_name(name: str, layout: Layout = Layout.vllm) -> str:
    """Return a parameter's tensor name in the checkpoint: in vLLM's layout the first layer is `midlayer`."""
    if layout is Layout.vllm and name.startswith("layers.0."):
        return name.replace("layers.0.", "midlayer.", 1)
    return name


def parameter_name(name: str) -> str:
    """Return the parameter's name of a checkpoint's tensor."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def read_raw_config(directory: Path) -> dict[str, Any]:
    """Read config.json. Raises UserError when it is missing or not a JSON object."""
    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError("config.json", directory, f"It cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise UserError("config.json", directory, "It is not a JSON object.")
    return raw


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read every tensor by its name in the checkpoint, from one safetensors file or several with an index.

    Raises:
        UserError: a file is missing, damaged, or not a safetensors file.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        try:
            tensors |= load_tensors(directory / file)
        except UserError as error:
            raise UserError(file, directory, f"It is damaged. {error.remedy}") from error
        except OSError as error:
            remedy = f"It cannot be read. Download or export it again ({error})."
            raise UserError(file, directory, remedy) from error
    return tensors


def _weight_files(directory: Path) -> list[str]:
    index = directory / INDEX
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, json.JSONDecodeError, KeyError) as error:
            raise UserError(INDEX, directory, f"It cannot be read: {error!r}") from error
    if not (directory / WEIGHTS).exists() and list(directory.glob("*.bin")):
        remedy = (
            "Its weights are pickled, and loading them can run any code; convert them to model.safetensors."
        )
        raise UserError("checkpoint", directory, remedy)
    return [WEIGHTS]
