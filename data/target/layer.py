"""The weights of one of a target's decoder layers, read without loading the model."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from data.target.checkpoint import read_modules
from data.target.loading import load_config, meta_model
from data.target.modules import locate
from data.target.spec import TargetSpec


@dataclass(frozen=True)
class TargetLayer:
    """A decoder layer of a target: the shapes of its weights, and the weights when they are read."""

    spec: TargetSpec
    index: int
    module: nn.Module = field(repr=False)  # on the meta device
    _model: PreTrainedModel = field(repr=False)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of each weight by its name within the layer."""
        return {name: weight.shape for name, weight in self.module.state_dict().items()}

    def read(self, modules: Collection[str]) -> dict[str, Tensor]:
        """Read the weights of some of the layer's modules in float32, by their names within the layer.

        Nothing else of the checkpoint is read.

        Raises:
            UserError: the checkpoint lacks a weight, or has it quantized.
        """
        needed = [self.module.get_submodule(name) for name in modules]
        states = read_modules(self.spec.checkpoint, self._model, needed)
        return {
            f"{name}.{key}": weight.float()
            for name, state in zip(modules, states, strict=True)
            for key, weight in state.items()
        }


def target_layers(spec: TargetSpec) -> list[TargetLayer]:
    """Return the target's decoder layers, without their weights.

    Raises:
        UserError: the model or its layers cannot be found.
    """
    model = meta_model(load_config(spec), spec)
    layers = locate(model, spec).layers
    return [TargetLayer(spec, index, layer, model) for index, layer in enumerate(layers)]
