"""A checkpoint in INT4 as it is published, made of a small model's, and the weights that it means."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle31.json_files import read_json, write_json

SETTINGS = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
            | {"symmetric": True, "dynamic": False},
            "input_activations": None,
        }
    },
}


def int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Groups of 32 along the input, eight values in an int32, the first in its lowest bits.

    Returns the tensors by the ends of their names, and the weights that they mean.
    """
    groups = weight.unflatten(1, (-1, 32))
    scale = groups.abs().amax(2, keepdim=True) / 7
    values = (groups / scale).round().clamp(-8, 7)
    shifted = (values.flatten(1).long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    packed = shifted.sum(2).to(torch.uint32).view(torch.int32)
    shape = torch.tensor(weight.shape)
    return {"_packed": packed, "_scale": scale[:, :, 0], "_shape": shape}, (values * scale).flatten(1)


def quantize(model: Path) -> Path:
    """Quantize the layers of a model in place; return a copy that has the rounded weights in float32."""
    stored: dict[str, Tensor] = {}
    meant = load_file(model / "model.safetensors")
    for name, tensor in list(meant.items()):
        if name.endswith("_proj.weight"):
            parts, meant[name] = int4(tensor)
            stored |= {f"{name}{end}": part.contiguous() for end, part in parts.items()}
        else:
            stored[name] = tensor
    reference = model.with_name("dequantized")
    shutil.copytree(model, reference)
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    config = model / "config.json"
    write_json(config, read_json(config) | {"quantization_config": SETTINGS})
    return reference
