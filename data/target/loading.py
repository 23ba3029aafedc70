"""Loading the frozen target, its config and its tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from data.target.architecture import model_class
from data.target.spec import TargetSpec
from eagle31.errors import UserError


def load_target(spec: TargetSpec, device: torch.device) -> PreTrainedModel:
    """The frozen target in eval mode, on `device` unless `spec.device_map` spreads it.

    Raises:
        UserError: the model is not there, cannot be downloaded, or is of no known architecture.
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
            dtype=spec.torch_dtype or "auto",
            **options,
        )
    return model.eval().requires_grad_(False)


def load_tokenizer(spec: TargetSpec, chat_template_file: str | None = None) -> PreTrainedTokenizerBase:
    """The target's tokenizer, with the chat template in `chat_template_file` in place of its own if given."""
    with spec.checkpoint.loading():
        tokenizer = AutoTokenizer.from_pretrained(
            spec.checkpoint.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    if chat_template_file is not None:
        try:
            tokenizer.chat_template = Path(chat_template_file).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            remedy = f"Cannot be read ({error.strerror}); give a file that holds a Jinja chat template."
            raise UserError("chat_template_file", chat_template_file, remedy) from error
    return tokenizer


def load_config(spec: TargetSpec) -> PreTrainedConfig:
    """The target's config; of a multimodal one, the whole of it.

    A checkpoint's own code is used only where transformers has no such architecture itself: code written for
    an older transformers does not run in this one.
    """
    return _load_config(spec, spec.checkpoint.find_file("config.json"))


def config_at_hand(spec: TargetSpec) -> PreTrainedConfig | None:
    """The same when it is on this machine; None without asking the hub."""
    path = spec.checkpoint.find_file("config.json", local=True)
    return None if path is None else _load_config(spec, path)


def _load_config(spec: TargetSpec, path: Path | None) -> PreTrainedConfig:
    known = path is not None and _model_type(path) in CONFIG_MAPPING
    with spec.checkpoint.loading():
        return AutoConfig.from_pretrained(
            spec.checkpoint.path,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code and not known,
        )


def _model_type(config_file: Path) -> str | None:
    return json.loads(config_file.read_text(encoding="utf-8")).get("model_type")


def has_remote_code(config: PreTrainedConfig, spec: TargetSpec) -> bool:
    own = type(config).__module__.startswith("transformers.")
    auto_map = getattr(config, "auto_map", None) or {}
    return spec.trust_remote_code and not own and "AutoModelForCausalLM" in auto_map


def auto_class(config: PreTrainedConfig, spec: TargetSpec) -> Any:
    return AutoModelForCausalLM if has_remote_code(config, spec) else model_class(config)
