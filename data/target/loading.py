"""Loading the frozen target and its config."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from data.target.architecture import model_class
from data.target.checkpoint import read_model_json
from data.target.spec import TargetSpec
from eagle31.cost.devices import computes_natively
from eagle31.errors import UserError
from eagle31.tensor_files import check_pointer


def load_target(spec: TargetSpec, device: torch.device) -> PreTrainedModel:
    """Load the frozen target in eval mode, on `device` unless `spec.device_map` spreads it.

    Raises:
        UserError: the model does not exist, cannot be downloaded, or has an unknown architecture.
    """
    config = load_config(spec)
    options: dict[str, Any] = {"device_map": spec.device_map or {"": str(device)}}
    if spec.attn_implementation is not None:
        options["attn_implementation"] = spec.attn_implementation
    with spec.checkpoint.loading():
        model = auto_class(config, spec).from_pretrained(
            spec.checkpoint.path,
            config=config,
            revision=spec.revision,
            trust_remote_code=has_remote_code(config, spec),
            dtype=compute_dtype(spec, config) or "auto",
            **options,
        )
    return model.eval().requires_grad_(False)


def compute_dtype(spec: TargetSpec, config: PreTrainedConfig) -> torch.dtype | None:
    """Return the dtype in which every engine computes the target; None where neither names one.

    For "auto" it is the checkpoint's. On a CPU that has no instructions for it, it is float32, because
    emulation takes longer; quantized weights keep theirs, for which their kernels are made.
    """
    dtype = config.dtype or config.get_text_config().dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if spec.torch_dtype is not None:
        return spec.torch_dtype
    quantized = getattr(config, "quantization_config", None) is not None
    return dtype if dtype is None or quantized or computes_natively(dtype) else torch.float32


def check_attention(spec: TargetSpec) -> None:
    """Raise UserError for an attention that transformers does not know; kernels of the Hub have a slash."""
    name = spec.attn_implementation
    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if name is not None and name not in known and "/" not in name:
        remedy = f"Choose one of {', '.join(known)}, or null for the default of transformers."
        raise UserError("target.attn_implementation", name, remedy)


def meta_model(config: PreTrainedConfig, spec: TargetSpec) -> PreTrainedModel:
    """Return the target on the meta device, without weights.

    Raises:
        UserError: the model has an unknown architecture.
    """
    remote = has_remote_code(config, spec)
    options = {"code_revision": spec.revision} if remote and spec.revision else {}
    with spec.checkpoint.loading(), torch.device("meta"):
        return auto_class(config, spec).from_config(config, trust_remote_code=remote, **options)


def load_config(spec: TargetSpec) -> PreTrainedConfig:
    """Load the target's config; for a multimodal target, the full config and not only the text part.

    The checkpoint's remote code is used only where transformers does not implement the architecture: code
    that was written for an older transformers does not run in the installed one.
    """
    return _load_config(spec, spec.checkpoint.find_file("config.json"))


def load_cached_config(spec: TargetSpec) -> PreTrainedConfig | None:
    """Load the target's config if it is on this machine; otherwise return None, without using the network."""
    path = spec.checkpoint.find_file("config.json", local=True)
    return None if path is None else _load_config(spec, path)


def has_remote_code(config: PreTrainedConfig, spec: TargetSpec) -> bool:
    """Return whether the model's class is code in the checkpoint, which the user trusts."""
    in_transformers = type(config).__module__.startswith("transformers.")
    auto_map = getattr(config, "auto_map", None) or {}
    return spec.trust_remote_code and not in_transformers and "AutoModelForCausalLM" in auto_map


def auto_class(config: PreTrainedConfig, spec: TargetSpec) -> Any:
    """Return the transformers auto class that builds the target."""
    return AutoModelForCausalLM if has_remote_code(config, spec) else model_class(config)


def _load_config(spec: TargetSpec, path: Path | None) -> PreTrainedConfig:
    known = path is not None and _model_type(path) in CONFIG_MAPPING
    with spec.checkpoint.loading():
        return AutoConfig.from_pretrained(
            spec.checkpoint.path,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code and not known,
        )


def _model_type(config_file: Path) -> str | None:
    check_pointer(config_file)
    content = read_model_json(config_file)
    return content.get("model_type") if isinstance(content, dict) else None
