"""Quantized checkpoints as they are published, made of a small model's, and the weights that they mean."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle31.json_files import read_json, write_json

FP8 = torch.float8_e4m3fn
Stored = dict[str, Tensor]  # the end of a tensor's name, as it follows the name of its module


def int4(weight: Tensor) -> tuple[Stored, Tensor]:
    """Groups of 32 along the input, eight values in an int32, the first in its lowest bits."""
    groups = weight.unflatten(1, (-1, 32))
    scale = groups.abs().amax(2, keepdim=True) / 7
    values = (groups / scale).round().clamp(-8, 7)
    shifted = (values.flatten(1).long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    packed = shifted.sum(2).to(torch.uint32).view(torch.int32)
    shape = torch.tensor(weight.shape)
    return {"_packed": packed, "_scale": scale[:, :, 0], "_shape": shape}, (values * scale).flatten(1)


def int8(weight: Tensor) -> tuple[Stored, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round()
    return {"": values.to(torch.int8), "_scale": scale}, values * scale


def fp8(weight: Tensor) -> tuple[Stored, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scale).to(FP8)
    return {"": values, "_scale": scale}, values.float() * scale


def fp8_blocks(weight: Tensor) -> tuple[Stored, Tensor]:
    """One scale for 128 x 128 weights: each of a stand-in's is smaller."""
    scale = weight.abs().amax() / 448
    values = (weight / scale).to(FP8)
    return {"": values, "_scale_inv": scale[None, None]}, values.float() * scale


def _weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_PER_TOKEN = {"strategy": "token", "dynamic": True}
FORMS: dict[str, tuple[Callable[[Tensor], tuple[Stored, Tensor]], dict[str, Any]]] = {
    "int4": (int4, _compressed("pack-quantized", _weights(4, "int", "group", group_size=32))),
    "int8": (
        int8,
        _compressed("int-quantized", _weights(8, "int", "channel"), _weights(8, "int", "") | _PER_TOKEN),
    ),
    "fp8": (
        fp8,
        _compressed("float-quantized", _weights(8, "float", "channel"), _weights(8, "float", "") | _PER_TOKEN)
        | {"kv_cache_scheme": _weights(8, "float", "tensor")},
    ),
    "fp8_blocks": (
        fp8_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
}


def quantize(model: Path, form: str) -> Path:
    """Quantize the layers of a model in place; return a copy that has the rounded weights in float32."""
    quantized, settings = FORMS[form]
    stored: Stored = {}
    meant = load_file(model / "model.safetensors")
    for name, tensor in list(meant.items()):
        if name.endswith("_proj.weight"):
            parts, meant[name] = quantized(tensor)
            stored |= {f"{name}{end}": part.contiguous() for end, part in parts.items()}
        else:
            stored[name] = tensor
    reference = model.with_name("dequantized")
    shutil.copytree(model, reference)
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    config = model / "config.json"
    write_json(config, read_json(config) | {"quantization_config": settings})
    return reference
