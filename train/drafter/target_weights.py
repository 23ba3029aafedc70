"""A drafter's first weights from the target's own layers.

fc         the last captured hidden state, unchanged: the identity for it, and zero for the others
attention  the projections of a target's layer, with the norm before them
mlp        the gate, up and down projections of a target's layer, with the norm before them

A drafter's first layer reads the token's embedding in addition to the state. The target's projections become
the state's half of its query, key and value projections (the first projections of MLA). The embedding's half
keeps its random weights, and the embedding's norm stays one. Further layers of the drafter take the target's
layers before the chosen one, so that the chosen one is the drafter's last.

A drafter has no norm of its queries and keys. Where the target has one (Qwen3), each head's projection is
scaled to what the norm gives on average for uncorrelated inputs: its rows are divided by the root mean square
of the head's output, and multiplied by the norm's weights. A bias of the target's projections is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from data.target.layer import TargetLayer, target_layers
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.layer import DrafterLayer
from train.config.drafter import FC

_FIELD = "drafter.init_from_target"
_LAYER = "drafter.init_target_layer"
_MODULES = {"attention": ("input_layernorm", "self_attn"), "mlp": ("post_attention_layernorm", "mlp")}


@dataclass(frozen=True)
class FromTarget:
    """Which weights of a drafter start from the target's."""

    spec: TargetSpec
    parts: tuple[str, ...]  # some of `train.config.drafter.TARGET_PARTS`
    layer: int  # the target's layer for the drafter's last layer; negative counts from the end


def start_from_target(drafter: Drafter, given: FromTarget) -> None:
    """Copy weights of the target into the drafter, which has its random ones.

    Raises:
        UserError: see `check_target_weights`; or the target's weights are quantized.
    """
    with torch.no_grad():
        if FC in given.parts:
            width = drafter.config.hidden_size
            drafter.fc.weight.zero_()
            drafter.fc.weight[:, -width:].fill_diagonal_(1)
        modules = [name for part in given.parts for name in _MODULES.get(part, ())]
        for ours, theirs in _pairs(drafter, given):
            try:
                weights = theirs.read(modules)
            except UserError as error:
                remedy = f"{error} Leave out the parts of a layer: set {_FIELD}=[] or {_FIELD}=[fc]."
                raise UserError(_FIELD, list(given.parts), remedy) from error
            for part in given.parts:
                _copy(ours, part, weights)


def check_target_weights(config: DrafterConfig, given: FromTarget) -> None:
    """Check that the target's weights fit the drafter, without reading them.

    Raises:
        UserError: the widths differ, a weight is absent in the target or has another shape, its norm is of
            another kind, or there is no such layer.
    """
    if config.hidden_size != config.target_hidden_size:
        remedy = f"{_FIELD} needs the target's width; set it to {config.target_hidden_size}, or to null."
        raise UserError("drafter.hidden_size", config.hidden_size, remedy)
    with torch.device("meta"):
        drafter = Drafter(config)
    for ours, theirs in _pairs(drafter, given):
        kind = type(theirs.module.get_submodule("input_layernorm")).__name__
        if kind.startswith("Gemma"):
            remedy = f"The target's {kind} adds one to its weights, which the drafter's norms do not; set []."
            raise UserError(_FIELD, list(given.parts), remedy)
        found = theirs.shapes()
        for part in given.parts:
            for name, (source, weight) in _destinations(ours, part).items():
                if found.get(source) != weight.shape:
                    raise _mismatch(part, name, weight.shape, source, found.get(source), theirs.index)


def _pairs(drafter: Drafter, given: FromTarget) -> list[tuple[DrafterLayer, TargetLayer]]:
    """Return each of the drafter's layers with the target's layer that it starts from."""
    if not set(given.parts) - {FC}:
        return []
    theirs, ours, layer = target_layers(given.spec), drafter.decoder_layers, given.layer
    last = layer + len(theirs) if layer < 0 else layer
    if not len(ours) - 1 <= last < len(theirs):
        remedy = (
            f"The target has the layers 0 to {len(theirs) - 1}, and the drafter needs {len(ours)} up to it."
        )
        raise UserError(_LAYER, layer, remedy)
    return list(zip(ours, theirs[last + 1 - len(ours) : last + 1], strict=True))


def _destinations(ours: DrafterLayer, part: str) -> dict[str, tuple[str, Tensor]]:
    """Return what a part sets, by the drafter's name: the target's name, and the weights to overwrite."""
    found: dict[str, tuple[str, Tensor]] = {}
    for name, parameter in ours.named_parameters():
        source: str = name
        weight: Tensor = parameter
        if ours.reads_embedding:
            if name == "input_layernorm.weight":  # the embedding's
                continue
            if name == "hidden_norm.weight":
                source = "input_layernorm.weight"
            elif _reads_both(ours, name):
                weight = weight[:, weight.shape[1] // 2 :]
        if source.split(".")[0] in _MODULES.get(part, ()):
            found[name] = source, weight
    return found


def _reads_both(ours: DrafterLayer, name: str) -> bool:
    """Return whether a weight of the layer that reads the embedding has the embedding's half too."""
    module = ours.get_submodule(name.rpartition(".")[0])
    attention = ours.self_attn
    return module in (attention.query_input, *attention.key_value_inputs)


def _copy(ours: DrafterLayer, part: str, weights: Mapping[str, Tensor]) -> None:
    for source, weight in _destinations(ours, part).values():
        weight.copy_(weights[source])
    for letter in ("q", "k"):
        norm = weights.get(f"self_attn.{letter}_norm.weight")
        if part == "attention" and norm is not None:
            name = f"self_attn.{letter}_proj.weight"
            _, weight = _destinations(ours, part)[name]
            weight.copy_(with_norm(weights[name], norm, weights["input_layernorm.weight"]))


def with_norm(projection: Tensor, norm: Tensor, input_norm: Tensor) -> Tensor:
    """Scale a projection to what the norm of its output gives for uncorrelated inputs of mean square one.

    Args:
        projection: [heads * D, H].
        norm: the norm's weights, [D] for each head alone or [heads * D] for all together.
        input_norm: [H], the weights of the norm before the projection.
    """
    heads = projection.unflatten(0, (-1, len(norm)))
    mean_square = (heads * input_norm).square().sum(-1).mean(-1)
    return (heads * (norm * mean_square.rsqrt().unsqueeze(-1)).unsqueeze(-1)).flatten(0, 1)


def _mismatch(
    part: str, name: str, expected: torch.Size, source: str, found: torch.Size | None, index: int
) -> UserError:
    has = "no" if found is None else f"{list(found)} as its"
    widths = "drafter.attention and its widths" if part == "attention" else "drafter.intermediate_size"
    experts = " A layer with a mixture of experts has none to copy." if part == "mlp" else ""
    remedy = (
        f"The drafter's {name} takes {list(expected)}, and layer {index} of the target has {has} {source}. "
        f"Leave out {part}, or set {widths} as in that layer, or another {_LAYER}.{experts}"
    )
    return UserError(_FIELD, part, remedy)
