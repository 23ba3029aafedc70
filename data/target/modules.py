"""Finding the decoder layers, final norm, embedding and lm_head of a target."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from data.target.spec import TargetSpec
from eagle31.errors import UserError

_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
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
    layers_path = spec.layers_path or _find_layers(model)
    layers = _submodule(model, "target.layers_path", layers_path)
    if not isinstance(layers, nn.ModuleList):
        remedy = f"It is a {type(layers).__name__}; give the path of the ModuleList of decoder layers."
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
    remedy = f"{type(model).__name__} has no ModuleList at {', '.join(tried)}; give the path of the layers."
    raise UserError("target.layers_path", None, remedy)


def _find_norm(decoder: nn.Module, decoder_path: str) -> str:
    paths = {name: f"{decoder_path}.{name}".lstrip(".") for name in _NORMS}
    for name, path in paths.items():
        if isinstance(getattr(decoder, name, None), nn.Module):
            return path
    remedy = f"There is no norm at {', '.join(paths.values())}; give the path of the norm before the lm_head."
    raise UserError("target.norm_path", None, remedy)


def _embedding(owners: list[nn.Module], getter: str, field: str, path: str | None) -> nn.Module:
    if path is not None:
        return _submodule(owners[0], field, path)
    for owner in owners:
        try:
            module = getattr(owner, getter)()
        except (AttributeError, NotImplementedError):  # a wrapper that leaves this to its inner model
            continue
        if module is not None:
            return module
    tried = ", ".join(f"{type(owner).__name__}.{getter}()" for owner in owners)
    remedy = f"None of {tried} returns a module; give the module's path, or a causal language model."
    raise UserError(field, None, remedy)
