"""Checkpoints as other tools publish them, made from our exports: fewer keys, fewer tensors, no record."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

# Keys that a reader must infer.
DEFAULTS = ("draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "norm_before_residual")
IDS = "eagle_aux_hidden_state_layer_ids"


def as_published(export: Path, directory: Path) -> Path:
    """Copy `export` to `directory` in the same layout, as another tool would write it.

    The plain layout gets `layers.0.` names, has the ids in `eagle_config` only, and no embedding. The layout
    of speculators loses the keys that we add to `transformer_layer_config`, as its trainer leaves it.
    """
    shutil.copytree(export, directory)
    (directory / "README.md").unlink()
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    del config["eagle31"]
    if "transformer_layer_config" in config:
        for key in (*DEFAULTS, IDS, "eagle_config", "fc_norm", "norm_output"):
            del config["transformer_layer_config"][key]
    else:
        for key in ("head_dim", "target_hidden_size", "num_aux_hidden_states", "norm_before_residual", IDS):
            config.pop(key, None)  # head_dim: MLA has none
        del tensors["embed_tokens.weight"]
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
