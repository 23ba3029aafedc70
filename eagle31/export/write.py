"""Writing the checkpoint that vLLM loads."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle31.errors import UserError
from eagle31.export.layouts import (
    WEIGHTS,
    Layout,
    Verifier,
    served_name,
    write_config,
)
from eagle31.json_files import write_json
from eagle31.model.config import DrafterConfig
from eagle31.model.vocab import DraftVocab

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def served_tensors(
    config: DrafterConfig,
    state: dict[str, Tensor],
    vocab: DraftVocab,
    embed_tokens: Tensor,
    *,
    dtype: str,
    layout: Layout,
) -> dict[str, Tensor]:
    """Everything that lies in `model.safetensors`, by its name there.

    Args:
        state: the drafter's parameters with `lm_head.weight`, by our names.
        embed_tokens: [V, H], kept with the bytes it has.
        dtype: of the drafter's tensors, a key of `DTYPES`.
    """
    tensors = {served_name(name, layout): tensor.to(DTYPES[dtype]) for name, tensor in state.items()}
    tensors["embed_tokens.weight"] = embed_tokens
    if config.pruned:
        tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


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
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Writes `config.json` and `model.safetensors` beside `directory` and renames; replaces an older export.

    Args:
        state, embed_tokens, dtype: as `served_tensors` takes them.
        provenance: target, revision, fingerprints; kept under `eagle31` in `config.json`.
        verifier: the target and how it drafts; needed for `Layout.speculators`.
        complete: is given the directory before it takes its place, to add to it and to check it; what it
            raises leaves the older export where it was.

    Raises:
        UserError: a weight is not finite.
    """
    tensors = served_tensors(config, state, vocab, embed_tokens, dtype=dtype, layout=layout)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(name, "nan or inf", "The trained weights are not finite; export an earlier step.")
    beside = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    save_file(tensors, beside / WEIGHTS, metadata={"format": "pt"})
    raw = write_config(config, layout, dtype, verifier)
    write_json(beside / "config.json", raw | {"eagle31": provenance})
    if complete is not None:
        complete(beside)
    if directory.exists():
        shutil.rmtree(directory)
    os.replace(beside, directory)
