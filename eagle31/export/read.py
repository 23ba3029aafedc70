"""Reads an exported or published checkpoint."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle31.errors import UserError
from eagle31.export.layouts import IDS, WEIGHTS, parameter_name, read_raw_config, read_tensors
from eagle31.export.published_config import read_config
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.kinds import new_drafter


@dataclass(frozen=True)
class TargetDefaults:
    """The target of a checkpoint: its sizes, and what a published checkpoint may leave out."""

    num_layers: int
    embed_tokens: Tensor  # [V, Ht]
    lm_head: Tensor  # [V, Ht]


@dataclass(frozen=True)
class LoadedExport:
    """An exported drafter, ready to draft."""

    drafter: Drafter
    embed_tokens: Tensor  # [V, H]
    draft_target_ids: Tensor | None  # int64 [Vd]
    config: dict[str, Any]  # the parsed config.json
    notes: tuple[str, ...] = ()  # assumptions where the checkpoint says nothing


def load_export(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    target: TargetDefaults | None = None,
    aux_layer_ids: Sequence[int] | None = None,
) -> LoadedExport:
    """Load a checkpoint written here or published elsewhere, in any layout, for evaluation.

    Args:
        target: the one that the checkpoint has to be for; it provides what a published one leaves out.
        aux_layer_ids: replace the checkpoint's.

    Raises:
        UserError: files or tensors are missing, damaged or of the wrong shape, the checkpoint has parts that
            are not supported here, or it is for another target.
    """
    raw = read_raw_config(directory)
    read = read_config(
        raw, num_target_layers=target.num_layers if target else None, aux_layer_ids=aux_layer_ids
    )
    config = read.config
    if target is not None:
        check_target(config, target)
    tensors = {parameter_name(name, read.layout): tensor for name, tensor in read_tensors(directory).items()}
    if config.dspark is not None:
        tensors = {name: one for name, one in tensors.items() if not name.startswith("confidence_head.")}
    embed_tokens = tensors.pop("embed_tokens.weight", None)
    d2t = tensors.pop("d2t", None)
    target_ids = draft_target_ids(d2t, tensors.pop("t2d", None), config)
    if embed_tokens is None:
        embed_tokens = _target_rows(target.embed_tokens if target else None, "embed_tokens.weight", config)
    if "lm_head.weight" not in tensors:
        # With a pruned vocabulary, vLLM would use the target's head for the wrong tokens.
        lm_head = target.lm_head if target is not None and not config.pruned else None
        tensors["lm_head.weight"] = _target_rows(lm_head, "lm_head.weight", config)
    try:
        with torch.device("meta"):  # no memory is allocated for the sizes that config.json states
            drafter = new_drafter(config)
        drafter.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError("export", directory, f"Its tensors do not match its config.json: {reason}") from error
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


def weights_digest(directory: Path) -> str:
    """Return the sha256 of an export's weights, in hexadecimal digits, as config.json has it."""
    with open(directory / WEIGHTS, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_weights(directory: Path) -> None:
    """Raise UserError if the weights or config.json of an export that was written here are not as written."""
    recorded = read_raw_config(directory).get("eagle31")
    path = directory / WEIGHTS
    digest = recorded.get("weights_sha256") if isinstance(recorded, dict) else None
    if not path.is_file() or digest != weights_digest(directory):
        remedy = "It is missing, or not as the export was written; the run's command writes it again."
        raise UserError("file", path, remedy)


def check_target(config: DrafterConfig, target: TargetDefaults) -> None:
    """Raise UserError for a drafter whose sizes and layers are those of another target."""
    vocab_size, hidden_size = target.embed_tokens.shape
    for name, expected in (("vocab_size", vocab_size), ("target_hidden_size", hidden_size)):
        if getattr(config, name) != expected:
            raise UserError(
                name, getattr(config, name), f"The target has {expected}: this is a drafter for another."
            )
    if not 0 <= config.aux_layer_ids[0] <= config.aux_layer_ids[-1] <= target.num_layers:
        remedy = f"The target has ids from 0 to {target.num_layers}: this is a drafter for another."
        raise UserError(IDS, list(config.aux_layer_ids), remedy)


def draft_target_ids(d2t: Tensor | None, t2d: Tensor | None, config: DrafterConfig) -> Tensor | None:
    """Return the target's id of each draft id, int64 [Vd]; None for the full vocabulary.

    Raises:
        UserError: d2t is missing, of the wrong size, points outside the target's vocabulary, names a token
            twice, or has other tokens than t2d.
    """
    if not config.pruned:
        if d2t is not None and d2t.any():
            remedy = "draft_vocab_size equals vocab_size, so there is nothing to map; vLLM refuses it."
            raise UserError("d2t", list(d2t.shape), remedy)
        return None
    if d2t is None:
        raise UserError("d2t", None, "It is missing from a checkpoint with a pruned draft vocabulary.")
    if d2t.shape != (config.draft_vocab_size,):
        raise UserError(
            "d2t", list(d2t.shape), f"It must have draft_vocab_size={config.draft_vocab_size} entries."
        )
    ids = d2t.long() + torch.arange(config.draft_vocab_size)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        remedy = "It points outside the target's vocabulary; d2t holds offsets, target id - draft id."
        raise UserError("d2t", f"{int(ids.min())}..{int(ids.max())}", remedy)
    found = torch.bincount(ids, minlength=config.vocab_size)
    if found.max() > 1:
        token = int(found.argmax())
        remedy = f"It names {int(found.sum() - found.count_nonzero())} tokens again, such as {token}."
        raise UserError(
            "d2t", d2t[ids == token].tolist(), f"{remedy} It holds offsets, target id - draft id."
        )
    if t2d is not None and (t2d.shape != found.shape or (num := int((t2d.bool() != found.bool()).sum()))):
        remedy = "t2d is the mask of the tokens that d2t names, so that one of the two is wrong."
        what = f"of shape {list(t2d.shape)}" if t2d.shape != found.shape else f"differs in {num:,} tokens"
        raise UserError("t2d", what, remedy)
    return ids


def _target_rows(rows: Tensor | None, name: str, config: DrafterConfig) -> Tensor:
    """Return the target's rows for a tensor that the checkpoint leaves out, where vLLM allows it."""
    if rows is None or rows.shape != (config.vocab_size, config.hidden_size):
        remedy = (
            "It is missing. The target's can replace it only where the drafter has the target's width, and "
            "the target's head only where the draft vocabulary is the full one."
        )
        raise UserError(name, None, remedy)
    return rows.detach()  # the drafter's cast is not to reach the target's parameter
