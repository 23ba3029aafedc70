"""Common mistakes in exports, applied to a good one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]


def shift_layer_ids(config: Config, tensors: Tensors) -> None:
    """Count the ids as "output of layer i"."""
    shifted = [layer_id + 1 for layer_id in config["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_aux_hidden_state_layer_ids"] = shifted
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = shifted


def drop_layer_ids(config: Config, tensors: Tensors) -> None:
    """Leave the ids out; vLLM then guesses them."""
    del config["eagle_aux_hidden_state_layer_ids"]
    del config["eagle_config"]


def feed_back_pre_norm(config: Config, tensors: Tensors) -> None:
    config["norm_output"] = False


def absolute_d2t(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def drop_fc_norm(config: Config, tensors: Tensors) -> None:
    """Drop the flag and the tensors; vLLM would refuse tensors without a module."""
    del config["fc_norm"]
    for name in [name for name in tensors if name.startswith("fc_norm.")]:
        del tensors[name]


def random_embedding(config: Config, tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = tensors["embed_tokens.weight"]
    random = torch.randn(embedding.shape, generator=generator) * embedding.float().std()
    tensors["embed_tokens.weight"] = random.to(embedding.dtype)


def drop_rope_scaling(config: Config, tensors: Tensors) -> None:
    config["rope_scaling"] = None
    config.pop("rope_parameters", None)


def drop_window(config: Config, tensors: Tensors) -> None:
    """Keep the width alone, which vLLM does not read without the layers' types."""
    del config["layer_types"]


MUTATIONS: dict[str, Callable[[Config, Tensors], None]] = {
    "layer ids off by one": shift_layer_ids,
    "layer ids left out": drop_layer_ids,
    "pre-norm state fed back": feed_back_pre_norm,
    "d2t as absolute ids": absolute_d2t,
    "fc_norm dropped": drop_fc_norm,
    "embedding random": random_embedding,
    "RoPE scaling dropped": drop_rope_scaling,
    "sliding window dropped": drop_window,
}


def mutate(export: Path, directory: Path, mutation: Callable[[Config, Tensors], None]) -> Path:
    """Copy `export` to `directory` and make one mistake in the copy."""
    shutil.copytree(export, directory)
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    mutation(config, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
