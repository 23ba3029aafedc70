"""What is asked of a target, in one place: the model, its tokenizer, its parts, its fingerprint."""

import copy
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from data.architecture import model_class
from data.checkpoint import Checkpoint, read_modules
from eagle31.errors import UserError

_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_INNER = ("language_model", "text_model", "decoder", "model", "transformer")


@dataclass(frozen=True)
class TargetSpec:
    """Which target, and how it is loaded."""

    model: str  # a local directory or a hub id
    revision: str | None = None
    dtype: str = "auto"  # "auto" is the checkpoint's own, else a torch dtype's name
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    device_map: str | None = None  # "auto" spreads it over the devices with accelerate
    layers_path: str | None = None  # module paths, for wrappers whose parts are not found by themselves
    norm_path: str | None = None
    embed_path: str | None = None
    lm_head_path: str | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.model, self.revision)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None for "auto"."""
        if self.dtype == "auto":
            return None
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            remedy = "No floating-point torch dtype; use auto, bfloat16, float16 or float32."
            raise UserError("target.dtype", self.dtype, remedy)
        return dtype


@dataclass(frozen=True)
class TargetModules:
    """The parts of a target that capture and the head need."""

    decoder: nn.Module  # owns the layers; called with input_ids it runs everything but the lm_head
    layers: nn.ModuleList
    final_norm: nn.Module
    embed_tokens: nn.Module
    lm_head: nn.Module


class TargetHead(nn.Module):
    """The target's own final norm and lm_head, frozen."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        self.requires_grad_(False)

    @property
    def weight(self) -> Tensor:
        """[V, Ht]"""
        return self.lm_head.get_parameter("weight")

    def forward(self, last_hidden: Tensor) -> Tensor:
        """last_hidden [..., Ht], before the final norm -> logits [..., V] in the parameters' dtype."""
        return self.lm_head(self.norm(last_hidden.to(self.weight.dtype)))

    def rows(self, t2d: Tensor) -> "TargetHead":
        """The same head over the draft vocabulary only: t2d bool [V] -> logits [..., Vd]."""
        t2d = t2d.to(self.weight.device)
        bias = getattr(self.lm_head, "bias", None)
        restricted = nn.Linear(self.weight.shape[1], int(t2d.sum()), bias=bias is not None, device="meta")
        restricted.weight = nn.Parameter(self.weight[t2d], requires_grad=False)
        if bias is not None:
            restricted.bias = nn.Parameter(bias[t2d], requires_grad=False)
        return TargetHead(self.norm, restricted)


@dataclass(frozen=True)
class TargetParts:
    """What training needs of a target whose hidden states are captured: a few tensors, not the model."""

    config: PreTrainedConfig
    embed_tokens: Tensor  # [V, Ht]
    head: TargetHead
    num_layers: int
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # empty when the checkpoint names none
    fingerprint: str


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
        model = _auto_class(config, spec).from_pretrained(
            spec.checkpoint.path,
            config=config,
            revision=spec.revision,
            trust_remote_code=_has_remote_code(config, spec),
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


def locate(model: PreTrainedModel, spec: TargetSpec) -> TargetModules:
    """Finds the decoder layers, final norm, embedding and lm_head, also inside multimodal wrappers.

    Raises:
        UserError: a part is not found; names the paths tried.
    """
    layers_path = spec.layers_path or _find_layers(model)
    layers = _submodule(model, "target.layers_path", layers_path)
    if not isinstance(layers, nn.ModuleList):
        remedy = f"Is a {type(layers).__name__}; give the path of the ModuleList of decoder layers."
        raise UserError("target.layers_path", layers_path, remedy)
    decoder_path = layers_path.rpartition(".")[0]
    decoder = model.get_submodule(decoder_path)
    parts = decoder_path.split(".") if decoder_path else []
    owners = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
    return TargetModules(
        decoder=decoder,
        layers=layers,
        final_norm=_submodule(model, "target.norm_path", spec.norm_path or _find_norm(decoder, decoder_path)),
        embed_tokens=_embedding(owners, "get_input_embeddings", "target.embed_path", spec.embed_path),
        lm_head=_embedding(owners, "get_output_embeddings", "target.lm_head_path", spec.lm_head_path),
    )


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer: (2, n // 2, n - 3), as EAGLE 3 chose.

    Below seven layers these are not three distinct ids in rising order: (1, n // 2, n - 1) is taken from four
    layers on, and the input of every layer (at most three) below that.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers >= 4:
        return (1, num_layers // 2, num_layers - 1)
    return tuple(range(num_layers))


def check_aux_layer_ids(aux_layer_ids: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Returns the ids as a tuple.

    Raises:
        UserError: they are not sorted, distinct and within 0..num_layers.
    """
    ids = tuple(aux_layer_ids)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_layers:
        remedy = (
            "Id i is the input of decoder layer i; give distinct ids in rising order from 0 (embeddings) to "
            f"{num_layers} (last layer's output), such as {list(default_aux_layer_ids(num_layers))}."
        )
        raise UserError("drafter.aux_layer_ids", list(ids), remedy)
    return ids


def load_target_parts(spec: TargetSpec) -> TargetParts:
    """Reads only the embedding, final norm and lm_head from the safetensors checkpoint, on the CPU.

    The architecture is built without memory to learn the names.

    Raises:
        UserError: the checkpoint has no safetensors, or not these tensors in a plain floating-point dtype.
    """
    config = load_config(spec)
    remote = _has_remote_code(config, spec)
    options = {"code_revision": spec.revision} if remote and spec.revision else {}
    with spec.checkpoint.loading(), torch.device("meta"):
        model = _auto_class(config, spec).from_config(config, trust_remote_code=remote, **options)
    modules = locate(model, spec)
    wanted = (modules.embed_tokens, modules.final_norm, modules.lm_head)
    embedding, norm, lm_head = read_modules(spec.checkpoint, model, wanted)
    dtype = spec.torch_dtype or _config_dtype(config) or embedding["weight"].dtype
    head = TargetHead(_filled(modules.final_norm, norm), _filled(modules.lm_head, lm_head)).to(dtype).eval()
    return TargetParts(
        config=config,
        embed_tokens=embedding["weight"].to(dtype),
        head=head,
        num_layers=len(modules.layers),
        hidden_size=head.weight.shape[1],
        vocab_size=head.weight.shape[0],
        eos_token_ids=_eos_token_ids(spec, config),
        fingerprint=spec.checkpoint.fingerprint(),
    )


def target_fingerprint(spec: TargetSpec) -> str:
    """What identifies the target's weights: the commit of a hub model, a sha256 of a local directory."""
    return spec.checkpoint.fingerprint()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of what turns text into ids; the chat template is not part of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = {"vocab": tokenizer.get_vocab(), "class": type(tokenizer).__name__}
    else:
        # Padding and truncation are what the last call of the tokenizer left behind.
        content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps([content, special], sort_keys=True).encode()).hexdigest()


def _has_remote_code(config: PreTrainedConfig, spec: TargetSpec) -> bool:
    own = type(config).__module__.startswith("transformers.")
    auto_map = getattr(config, "auto_map", None) or {}
    return spec.trust_remote_code and not own and "AutoModelForCausalLM" in auto_map


def _auto_class(config: PreTrainedConfig, spec: TargetSpec) -> Any:
    return AutoModelForCausalLM if _has_remote_code(config, spec) else model_class(config)


def _config_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    dtype = config.dtype or config.get_text_config().dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _submodule(model: nn.Module, field: str, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise UserError(field, path, f"{type(model).__name__} has no such module ({error}).") from error


def _find_layers(model: PreTrainedModel) -> str:
    paths = {module: path for path, module in model.named_modules()}
    module, tried = model.get_decoder(), []
    while module is not None:
        for name in _LAYERS:
            path = f"{paths[module]}.{name}".lstrip(".")
            if isinstance(getattr(module, name, None), nn.ModuleList):
                return path
            tried.append(path)
        inner = (getattr(module, name, None) for name in _INNER)
        module = next((child for child in inner if isinstance(child, nn.Module)), None)
    remedy = f"{type(model).__name__} has no ModuleList at {', '.join(tried)}; give its path."
    raise UserError("target.layers_path", None, remedy)


def _find_norm(decoder: nn.Module, decoder_path: str) -> str:
    paths = {name: f"{decoder_path}.{name}".lstrip(".") for name in _NORMS}
    for name, path in paths.items():
        if isinstance(getattr(decoder, name, None), nn.Module):
            return path
    remedy = f"No final norm at {', '.join(paths.values())}; give the path of the norm before the lm_head."
    raise UserError("target.norm_path", None, remedy)


def _embedding(owners: list[nn.Module], getter: str, field: str, path: str | None) -> nn.Module:
    if path is not None:
        return _submodule(owners[0], field, path)
    for owner in owners:
        try:
            module = getattr(owner, getter)()
        except (AttributeError, NotImplementedError):  # a wrapper that leaves it to the model inside
            continue
        if module is not None:
            return module
    tried = ", ".join(f"{type(owner).__name__}.{getter}()" for owner in owners)
    remedy = f"None of {tried} returns a module; give its path, or a causal language model."
    raise UserError(field, None, remedy)


def _filled(module: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    module = copy.deepcopy(module)
    module.load_state_dict(state, assign=True)
    return module


def _eos_token_ids(spec: TargetSpec, config: PreTrainedConfig) -> tuple[int, ...]:
    """The generation config's, where there is one: chat models end a turn with other tokens than a text."""
    path = spec.checkpoint.find_file("generation_config.json")
    eos = None if path is None else GenerationConfig.from_pretrained(path.parent).eos_token_id
    if eos is None:
        eos = getattr(config.get_text_config(), "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
