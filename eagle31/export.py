"""The checkpoint that vLLM loads, and reading it back."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle31.config import DrafterConfig
from eagle31.drafter import Drafter
from eagle31.errors import UserError
from eagle31.json_files import write_json
from eagle31.vocab import DraftVocab

WEIGHTS = "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedExport:
    """An exported drafter, ready to draft."""

    drafter: Drafter
    embed_tokens: Tensor  # [V, H]
    draft_target_ids: Tensor | None  # int64 [Vd]
    config: dict[str, Any]  # config.json as it lies there


def served_name(name: str) -> str:
    """Our parameter name -> the checkpoint's: the first layer is `midlayer` there."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def own_name(name: str) -> str:
    """The checkpoint's tensor name -> ours."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def write_export(
    directory: Path,
    config: DrafterConfig,
    state: dict[str, Tensor],
    vocab: DraftVocab,
    embed_tokens: Tensor,
    *,
    dtype: str,
    provenance: dict[str, Any],
) -> None:
    """Writes `config.json` and `model.safetensors` beside `directory` and renames; replaces an older export.

    Args:
        state: the drafter's parameters with `lm_head.weight`, by our names.
        embed_tokens: [V, H], written with the bytes it has.
        dtype: of the drafter's tensors, a key of `DTYPES`.
        provenance: target, revision, fingerprints; kept under `eagle31` in `config.json`.

    Raises:
        UserError: a weight is not finite.
    """
    tensors = {served_name(name): tensor.to(DTYPES[dtype]).contiguous() for name, tensor in state.items()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(name, "nan or inf", "The trained weights are not finite; export an earlier step.")
    tensors["embed_tokens.weight"] = embed_tokens.contiguous()
    if config.pruned:
        tensors["d2t"] = vocab.d2t
        tensors["t2d"] = vocab.t2d
    beside = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    save_file(tensors, beside / WEIGHTS, metadata={"format": "pt"})
    write_json(beside / "config.json", config.to_json(dtype) | {"eagle31": provenance})
    if directory.exists():
        shutil.rmtree(directory)
    os.replace(beside, directory)


def load_export(directory: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> LoadedExport:
    """Reads an export back for evaluation.

    Raises:
        UserError: files or tensors are missing, damaged or of the wrong shape.
    """
    try:
        raw = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise UserError("export", directory, f"It can not be read: {error}") from error
    config = DrafterConfig.from_json(raw)
    embed_tokens = tensors.pop("embed_tokens.weight", None)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if embed_tokens is None:
        raise UserError("export", directory, "embed_tokens.weight is missing.")
    if config.pruned and (d2t is None or t2d is None):
        raise UserError("export", directory, "d2t or t2d is missing from a pruned draft vocabulary.")
    drafter = Drafter(config)
    try:
        drafter.load_state_dict({own_name(name): tensor for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise UserError("export", directory, f"Its tensors do not fit its config.json: {error}") from error
    drafter.to(device=device, dtype=dtype).requires_grad_(False)
    target_ids = None
    if d2t is not None:
        target_ids = (d2t + torch.arange(d2t.shape[0])).to(device)
    return LoadedExport(drafter, embed_tokens.to(device=device, dtype=dtype), target_ids, raw)
