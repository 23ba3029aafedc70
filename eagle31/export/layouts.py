"""The layouts in which EAGLE-3 drafters are published: config.json and tensor names, in both directions."""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle31.errors import UserError
from eagle31.model.config import DrafterConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

IDS = "eagle_aux_hidden_state_layer_ids"


class Layout(Enum):
    """How an export is written."""

    vllm = "vllm"  # the drafter's own config.json: `--speculative-config` names export and method
    speculators = "speculators"  # names its target too: a bare `vllm serve EXPORT`


@dataclass(frozen=True)
class Verifier:
    """What a speculators checkpoint says of how it is served."""

    name_or_path: str  # the target
    architectures: tuple[str, ...]
    draft_tokens: int


def write_config(
    config: DrafterConfig, layout: Layout, dtype: str, verifier: Verifier | None = None
) -> dict[str, Any]:
    """`config.json` in a layout.

    Args:
        dtype: of the exported weights, such as "bfloat16".
        verifier: needed for `Layout.speculators`.

    Raises:
        UserError: vLLM reads no such layout of this drafter.

    Source: vllm/transformers_utils/configs/speculators (what vLLM reads of it).
    """
    own = config.to_json(dtype)
    if layout is Layout.vllm:
        return own
    check_layout(config, layout)
    assert verifier is not None
    # vLLM takes the norms and the ids from the top level and everything else from the layer's config.
    at_top = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "fc_norm", "norm_output", IDS)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": verifier.draft_tokens}],
            "verifier": {
                "name_or_path": verifier.name_or_path,
                "architectures": list(verifier.architectures),
            },
        },
        **{key: own[key] for key in at_top},
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": {key: value for key, value in own.items() if key != "architectures"},
    }


def check_layout(config: DrafterConfig, layout: Layout) -> None:
    """Raises UserError when vLLM reads no such layout of this drafter."""
    if config.mla is not None and layout is Layout.speculators:
        remedy = "vLLM reads this layout for grouped-query attention alone; use export.layout=vllm."
        raise UserError("export.layout", layout.value, remedy)


def layout_of(raw: dict[str, Any]) -> Layout:
    """Of a parsed config.json."""
    is_speculators = "speculators_config" in raw or "speculators_model_type" in raw
    return Layout.speculators if is_speculators else Layout.vllm


def layer_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The drafter's keys as vLLM sees them: speculators' top level overrides some of the layer's.

    Raises:
        UserError: a speculators checkpoint of another algorithm, or without its layer.
    """
    if layout_of(raw) is Layout.vllm:
        return raw
    if raw.get("speculators_model_type") != "eagle3":
        remedy = "Only eagle3 drafters can be read."
        raise UserError("speculators_model_type", raw.get("speculators_model_type"), remedy)
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError("transformer_layer_config", layer, "The layer's shape is missing from config.json.")
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
    """Our parameter name -> the checkpoint's: in vLLM's layout the first layer is `midlayer`."""
    if layout is Layout.vllm and name.startswith("layers.0."):
        return name.replace("layers.0.", "midlayer.", 1)
    return name


def parameter_name(name: str) -> str:
    """The checkpoint's tensor name -> ours."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def read_raw_config(directory: Path) -> dict[str, Any]:
    """Raises UserError when config.json is not there or not JSON."""
    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError("config.json", directory, f"It can not be read: {error}") from error
    if not isinstance(raw, dict):
        raise UserError("config.json", directory, "It holds no JSON object.")
    return raw


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor by the name it has there, from one safetensors file or several with their index.

    Raises:
        UserError: a file is missing, damaged, or no safetensors.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        try:
            tensors |= load_file(directory / file)
        except (OSError, SafetensorError) as error:
            remedy = f"It can not be read, it is missing or damaged; fetch or export it again ({error})."
            raise UserError(file, directory, remedy) from error
    return tensors


def _weight_files(directory: Path) -> list[str]:
    index = directory / INDEX
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, json.JSONDecodeError, KeyError) as error:
            raise UserError(INDEX, directory, f"It can not be read: {error!r}") from error
    if not (directory / WEIGHTS).exists() and list(directory.glob("*.bin")):
        remedy = "Its weights are pickled, which can run any code; convert them to model.safetensors."
        raise UserError("checkpoint", directory, remedy)
    return [WEIGHTS]
