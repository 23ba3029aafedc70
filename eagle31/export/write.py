"""Writes the checkpoint that vLLM loads."""

import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle31.errors import UserError
from eagle31.export.config_json import config_json
from eagle31.export.drafts import check_drafts, made_up_drafts
from eagle31.export.layouts import WEIGHTS, Layout, Verifier, served_name
from eagle31.export.published_config import read_config
from eagle31.export.read import load_export, weights_digest
from eagle31.json_files import write_json
from eagle31.model.config import DrafterConfig
from eagle31.model.kinds import new_drafter
from eagle31.model.vocab import DraftVocab
from eagle31.tensor_files import save_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_config(config: DrafterConfig, layout: Layout) -> None:
    """Raise UserError for a drafter that could not be exported, whatever its weights."""
    raw = config_json(config, layout, "float32", Verifier("", (), 1))
    try:
        _check_read_back(read_config(raw).config, config)
    except UserError as error:
        raise UserError(f"drafter.{error.field}", error.value, error.remedy) from None


def write_export(
    directory: Path,
    config: DrafterConfig,
    state: dict[str, Tensor],
    vocab: DraftVocab,
    embed_tokens: Tensor,
    *,
    dtype: str,
    provenance: dict[str, Any],
    layout: Layout = Layout.vllm,
    verifier: Verifier | None = None,
) -> None:
    """Write an export and check it. It replaces an older one only when it is complete.

    What is written is read back as vLLM reads it, and has to draft as the given weights do.

    Args:
        state: the drafter's parameters by their names here, with `lm_head.weight`.
        embed_tokens: [V, H]; its bytes are not changed.
        dtype: a key of `DTYPES`, for the drafter's tensors.
        provenance: target, revision, fingerprints; kept under `eagle31` in `config.json`.
        verifier: the target and its number of draft tokens; required for `Layout.speculators`.

    Raises:
        UserError: a weight is not finite or too large for `dtype`, or vLLM would not serve the export as it
            was trained.
    """
    for name, tensor in (state | {"embed_tokens.weight": embed_tokens}).items():
        if not torch.isfinite(tensor).all():
            raise UserError(name, "nan or inf", "The trained weights are not finite; export an earlier step.")
    tensors = {
        served_name(name, layout, config.dspark is None): tensor.to(DTYPES[dtype])
        for name, tensor in state.items()
    }
    tensors["embed_tokens.weight"] = embed_tokens
    if config.pruned:
        tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError("export.dtype", dtype, f"{name} has values beyond its range; choose bfloat16.")
    drafter = new_drafter(config)
    drafter.load_state_dict({name: tensor.to(DTYPES[dtype]) for name, tensor in state.items()})
    drafts = made_up_drafts(drafter.float(), embed_tokens)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_tensors(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    raw = config_json(config, layout, dtype, verifier)
    recorded = {"drafts": drafts, "weights_sha256": weights_digest(partial)}
    write_json(partial / "config.json", raw | {"eagle31": provenance | recorded})
    loaded = load_export(partial, torch.device("cpu"))
    _check_read_back(loaded.drafter.config, config)
    check_drafts(drafts, loaded.drafter, loaded.embed_tokens)
    older = directory.with_name(f".{directory.name}.older")
    shutil.rmtree(older, ignore_errors=True)
    if directory.exists():
        os.replace(directory, older)
    os.replace(partial, directory)
    shutil.rmtree(older, ignore_errors=True)


def _check_read_back(served: DrafterConfig, trained: DrafterConfig) -> None:
    """Raise UserError for a field that vLLM reads otherwise, except RoPE, which the drafts compare."""
    for name in (field.name for field in fields(DrafterConfig) if field.name != "rope_parameters"):
        found, expected = getattr(served, name), getattr(trained, name)
        if found != expected:
            raise UserError(
                name, expected, f"vLLM would read {found} from config.json and serve another drafter."
            )
