"""The checkpoint that vLLM loads, and reading ours and published ones back."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle31.config import DrafterConfig
from eagle31.drafter import Drafter
from eagle31.errors import UserError
from eagle31.json_files import write_json
from eagle31.layouts import (
    WEIGHTS,
    Layout,
    Verifier,
    own_name,
    read_raw_config,
    read_tensors,
    served_name,
    write_config,
)
from eagle31.published_config import read_config
from eagle31.vocab import DraftVocab

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TargetDefaults:
    """What a published checkpoint may leave to its target."""

    num_layers: int
    embed_tokens: Tensor  # [V, Ht]
    lm_head: Tensor  # [V, Ht]


@dataclass(frozen=True)
class LoadedExport:
    """An exported drafter, ready to draft."""

    drafter: Drafter
    embed_tokens: Tensor  # [V, H]
    draft_target_ids: Tensor | None  # int64 [Vd]
    config: dict[str, Any]  # config.json as it lies there
    notes: tuple[str, ...] = ()  # what was assumed where the checkpoint says nothing


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


def load_export(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    target: TargetDefaults | None = None,
    aux_layer_ids: Sequence[int] | None = None,
) -> LoadedExport:
    """Reads an export, ours or a published one in any layout, for evaluation.

    Args:
        target: stands in for what a published checkpoint leaves out; ours leave nothing out.
        aux_layer_ids: in place of the checkpoint's own.

    Raises:
        UserError: files or tensors are missing, damaged or of the wrong shape, or the checkpoint has parts
            that our drafter has not.
    """
    raw = read_raw_config(directory)
    read = read_config(
        raw, num_target_layers=target.num_layers if target else None, aux_layer_ids=aux_layer_ids
    )
    config = read.config
    tensors = {own_name(name): tensor for name, tensor in read_tensors(directory).items()}
    embed_tokens = tensors.pop("embed_tokens.weight", None)
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    target_ids = draft_target_ids(d2t, config)
    if embed_tokens is None:
        embed_tokens = _target_rows(target.embed_tokens if target else None, "embed_tokens.weight", config)
    if "lm_head.weight" not in tensors:
        # Of a pruned vocabulary vLLM would take the target's head for the wrong tokens.
        own_head = target.lm_head if target is not None and not config.pruned else None
        tensors["lm_head.weight"] = _target_rows(own_head, "lm_head.weight", config)
    drafter = Drafter(config)
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError("export", directory, f"Its tensors do not fit its config.json: {error}") from error
    if embed_tokens.shape != (config.vocab_size, config.hidden_size):
        expected = f"[{config.vocab_size}, {config.hidden_size}]"
        raise UserError("embed_tokens.weight", list(embed_tokens.shape), f"Its shape must be {expected}.")
    drafter.to(device=device, dtype=dtype).requires_grad_(False)
    return LoadedExport(
        drafter,
        embed_tokens.to(device=device, dtype=dtype),
        None if target_ids is None else target_ids.to(device),
        raw,
        read.notes,
    )


def draft_target_ids(d2t: Tensor | None, config: DrafterConfig) -> Tensor | None:
    """int64 [Vd], the target's id of each draft id; None for the full vocabulary.

    Raises:
        UserError: d2t is missing, of the wrong size, or points outside the target's vocabulary.
    """
    if not config.pruned:
        if d2t is not None and d2t.any():
            remedy = "draft_vocab_size equals vocab_size, so there is nothing to map; vLLM would refuse it."
            raise UserError("d2t", list(d2t.shape), remedy)
        return None
    if d2t is None:
        raise UserError("d2t", None, "It is missing from a checkpoint with a pruned draft vocabulary.")
    if d2t.shape != (config.draft_vocab_size,):
        raise UserError("d2t", list(d2t.shape), f"It must have draft_vocab_size={config.draft_vocab_size}.")
    ids = d2t.long() + torch.arange(config.draft_vocab_size)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        remedy = "It points outside the target's vocabulary; d2t holds offsets, target id - draft id."
        raise UserError("d2t", f"{int(ids.min())}..{int(ids.max())}", remedy)
    return ids


def _target_rows(rows: Tensor | None, name: str, config: DrafterConfig) -> Tensor:
    """The target's, for a tensor that the checkpoint leaves out as vLLM allows."""
    if rows is None or rows.shape != (config.vocab_size, config.hidden_size):
        remedy = (
            "It is missing; the target's can stand in for it only where the drafter has the target's width, "
            "and its head only where the draft vocabulary is the whole one."
        )
        raise UserError(name, None, remedy)
    return rows
