"""The layouts in which drafters are published: their keys, their tensor names, their files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle31.choice import Choice
from eagle31.errors import UserError
from eagle31.json_files import read_json_object
from eagle31.tensor_files import check_pointer, load_pickled_tensors, load_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# The files of `torch.save`, of which most published EAGLE-3 drafters consist.
PICKLED_WEIGHTS, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Of the names in TorchSpec's checkpoints, which torch's dcp_to_torch makes a file of `torch.save`.
TORCHSPEC_PREFIX = "model_state.model.draft_model."

DSPARK, DFLASH = "Qwen3DSparkModel", "DFlashDraftModel"  # the architectures of their drafters

IDS = "eagle_aux_hidden_state_layer_ids"
# The architectures as which vLLM loads the layers of speculators' drafters, by their model_type.
_SPECULATORS_LAYERS = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}

# What vLLM reads from the top level of speculators' config.json alone, and its defaults.
SPECULATORS_TOP: dict[str, bool | None] = {
    **{"draft_vocab_size": None, "norm_before_residual": True},
    **{"norm_before_fc": False, "fc_norm": False, "norm_output": False},
}


class Layout(Choice):
    """The layout of an export's files."""

    vllm = "vllm", "the drafter's config.json: `--speculative-config` names export and method"
    speculators = "speculators", "config.json names the target too: `vllm serve EXPORT` is enough"
    sglang = "sglang", "as vllm, and SGLang captures the same layers"


@dataclass(frozen=True)
class Verifier:
    """What a speculators checkpoint says about how it is served."""

    name_or_path: str  # the target
    architectures: tuple[str, ...]
    draft_tokens: int


def layout_of(raw: dict[str, Any]) -> Layout:
    """Return the layout of a parsed config.json."""
    if "speculators_config" in raw or "speculators_model_type" in raw:
        return Layout.speculators
    ids, inner_ids = raw.get(IDS), (raw.get("eagle_config") or {}).get(IDS)
    return Layout.sglang if ids and inner_ids and inner_ids == sglang_ids(ids) else Layout.vllm


def sglang_ids(aux_layer_ids: Sequence[int]) -> list[int]:
    """Return aux layer ids as SGLang counts them: layer outputs, where vLLM counts layer inputs.

    vLLM reads the ids at the top level and SGLang those in `eagle_config`, so a config.json can have both.

    Source: `set_eagle3_layers_to_capture` in SGLang's models.
    """
    return [i - 1 for i in aux_layer_ids]


def served_method(raw: dict[str, Any]) -> str:
    """Return the `method` of vLLM's speculative config for a parsed config.json."""
    methods = {DSPARK: "dspark", DFLASH: "dflash"}
    return next((methods[one] for one in raw.get("architectures") or () if one in methods), "eagle3")


def layer_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the drafter's keys as vLLM reads them: speculators' top level overrides some of the layer's.

    Raises:
        UserError: a speculators checkpoint has another algorithm, or no layer config.
    """
    if layout_of(raw) is not Layout.speculators:
        return raw
    if raw.get("speculators_model_type") != "eagle3":
        remedy = "Only eagle3 drafters are supported."
        raise UserError("speculators_model_type", raw.get("speculators_model_type"), remedy)
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError("transformer_layer_config", layer, "config.json does not have the layer's shape.")
    architecture = _SPECULATORS_LAYERS.get(layer.get("model_type", "llama"))
    if architecture is None:
        remedy = f"vLLM reads {' and '.join(_SPECULATORS_LAYERS)} layers."
        raise UserError("transformer_layer_config.model_type", layer["model_type"], remedy)
    taken = {key: raw[key] for key in ("target_hidden_size", IDS) if raw.get(key)}
    taken |= {key: raw.get(key, default) for key, default in SPECULATORS_TOP.items()}
    return layer | taken | {"architectures": [architecture]}


def served_name(name: str, layout: Layout, is_eagle: bool) -> str:
    """Return a parameter's tensor name in the checkpoint.

    EAGLE's first layer is `midlayer`, except in speculators' layout. SGLang calls the norm of a later layer's
    input `hidden_norm`.
    """
    if is_eagle and layout is not Layout.speculators and name.startswith("layers.0."):
        return name.replace("layers.0.", "midlayer.", 1)
    return name.replace("input_layernorm", "hidden_norm") if layout is Layout.sglang else name


def parameter_name(name: str, layout: Layout) -> str:
    """Return the parameter's name of a checkpoint's tensor."""
    name = name.removeprefix(TORCHSPEC_PREFIX).removeprefix("model.")
    if name.startswith("midlayer."):
        return name.replace("midlayer.", "layers.0.", 1)
    later = layout is Layout.sglang and not name.startswith("layers.0.")
    return name.replace("hidden_norm", "input_layernorm") if later else name


def read_raw_config(directory: Path) -> dict[str, Any]:
    """Read config.json. Raises UserError when it is missing or not a JSON object."""
    path = directory / "config.json"
    try:
        check_pointer(path)
        return read_json_object(path)
    except (UserError, OSError) as error:
        reason = f"It cannot be read: {getattr(error, 'remedy', error)}"
        if isinstance(error, FileNotFoundError):
            reason = "There is no such file; give a drafter's directory, such as the export/ of a run."
        raise UserError("config.json", directory, reason) from error


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read every tensor by its name in the checkpoint, from one file or from several with an index.

    Files of `torch.save` are read where there is no safetensors file, without running code in them.

    Raises:
        UserError: a file is missing, damaged, or not one of weights.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        try:
            read = load_tensors if file.endswith(".safetensors") else load_pickled_tensors
            tensors |= read(directory / file)
        except UserError as error:
            raise UserError(file, directory, f"It is damaged. {error.remedy}") from error
        except OSError as error:
            remedy = f"It cannot be read. Download or export it again ({error})."
            raise UserError(file, directory, remedy) from error
    return tensors


def _weight_files(directory: Path) -> list[str]:
    """Return the names of the files with weights, as transformers and vLLM choose them."""
    for whole, index in ((WEIGHTS, INDEX), (PICKLED_WEIGHTS, PICKLED_INDEX)):
        if (directory / index).exists():
            return _files_of_index(directory, index)
        if (directory / whole).exists():
            return [whole]
    return [WEIGHTS]


def _files_of_index(directory: Path, index: str) -> list[str]:
    """Return the files that an index names; all have to be next to it."""
    try:
        content = read_json_object(directory / index)
        files = sorted(set(content["weight_map"].values()))
        strange = [file for file in files if Path(file).name != file]
    except (UserError, OSError, KeyError, TypeError, AttributeError) as error:
        raise UserError(index, directory, f"It cannot be read: {error!r}") from error
    if strange or not files:
        remedy = (
            f"It names {strange[0]!r}, which is not a file next to it." if strange else "It names no file."
        )
        raise UserError(index, directory, remedy)
    return files
