"""Finding the decoder layers, final norm, embedding and lm_head of a target."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from data.target.spec import TargetSpec
from eagle31.errors import UserError

_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_REMEDY = "Give a causal language model, or add the name in data/target/modules.py."
_INNER = ("language_model", "text_model", "decoder", "model", "transformer")


@dataclass(frozen=True)
class TargetModules:
    """The modules of a target that capture and the head need."""

    decoder: nn.Module  # owns the layers; its forward pass on input_ids runs everything but the lm_head
    layers: nn.ModuleList
    final_norm: nn.Module
    embed_tokens: nn.Module
    lm_head: nn.Module


def locate(model: PreTrainedModel, spec: TargetSpec) -> TargetModules:
    """Find the decoder layers, final norm, embedding and lm_head, also inside multimodal wrappers.

    Raises:
        UserError: a module is not found; the error names the paths that were tried.
    """
    layers_path = _find_layers(model, spec)
    layers = model.get_submodule(layers_path)
    assert isinstance(layers, nn.ModuleList)
    decoder_path = layers_path.rpartition(".")[0]
    decoder = model.get_submodule(decoder_path)
    parts = decoder_path.split(".") if decoder_path else []
    owners = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
    return TargetModules(
        decoder=decoder,
        layers=layers,
        final_norm=_find_norm(decoder, decoder_path, spec),
        embed_tokens=_embedding(owners, "get_input_embeddings", spec),
        lm_head=_embedding(owners, "get_output_embeddings", spec),
    )


def _find_layers(model: PreTrainedModel, spec: TargetSpec) -> str:
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
    raise UserError("target.model", spec.model, f"No decoder layers are at {', '.join(tried)}. {_REMEDY}")


def _find_norm(decoder: nn.Module, decoder_path: str, spec: TargetSpec) -> nn.Module:
    for name in _NORMS:
        if isinstance(norm := getattr(decoder, name, None), nn.Module):
            return norm
    tried = ", ".join(f"{decoder_path}.{name}".lstrip(".") for name in _NORMS)
    raise UserError("target.model", spec.model, f"No final norm is at {tried}. {_REMEDY}")


def _embedding(owners: list[nn.Module], getter: str, spec: TargetSpec) -> nn.Module:
    for owner in owners:
        try:
            module = getattr(owner, getter)()
        except (AttributeError, NotImplementedError):  # a wrapper that leaves this to its inner model
            continue
        if module is not None:
            return module
    tried = ", ".join(f"{type(owner).__name__}.{getter}()" for owner in owners)
    raise UserError("target.model", spec.model, f"None of {tried} returns a module. {_REMEDY}")
