"""Drafter checkpoints to start training from, exported or published: found, checked, and loaded."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedConfig

from data.target.checkpoint import comparable_fingerprints, is_hub_id
from data.target.parts import TargetParts, load_target_parts
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer, tokenizer_fingerprint
from eagle31.errors import UserError
from eagle31.export.drafts import check_drafts
from eagle31.export.layouts import layer_config, read_raw_config
from eagle31.export.published_config import stated_ids
from eagle31.export.read import LoadedExport, TargetDefaults, load_export
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.vocab import DraftVocab, coverage
from train.config.drafter import Attention, DrafterShape, Method
from train.drafter.shape import sliding_window

# What training may change of a checkpoint.
_FREE = {"fc_norm", "norm_output", "sliding_window", "max_position_embeddings"}
_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json"]
_PICKLED_FILES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]  # where there is no safetensors file


def fetch_checkpoint(name: str, revision: str | None, field: str) -> Path:
    """Return the directory of a checkpoint, which is downloaded if `name` is a Hub id.

    Args:
        field: the setting that `name` is from, for errors.

    Raises:
        UserError: `name` is neither a directory nor a Hub id, or the download fails.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not is_hub_id(name):
        raise UserError(field, name, "No such directory; give a directory or a Hub id.")
    try:
        found = Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
        if not list(found.glob("*.safetensors")):
            found = Path(snapshot_download(name, revision=revision, allow_patterns=_FILES + _PICKLED_FILES))
        return found
    except (OSError, ValueError) as error:
        raise UserError(field, name, f"It cannot be downloaded: {' '.join(str(error).split())}") from error


def open_published(
    directory: Path, parts: TargetParts, aux_layer_ids: Sequence[int] | None, field: str
) -> LoadedExport:
    """Load a checkpoint in float32 on the CPU, after checking that it is for this target.

    Args:
        aux_layer_ids: replace those of the checkpoint unless None.
        field: the setting that `directory` is from, for errors.

    Raises:
        UserError: the checkpoint cannot be read, is for another target, was changed since its export, or has
            weights that are not finite.
    """
    cpu, target = torch.device("cpu"), target_defaults(parts)
    loaded = load_export(directory, cpu, target=target, aux_layer_ids=aux_layer_ids)
    check_finite(loaded, directory, field)
    recorded = (loaded.config.get("eagle31") or {}).get("drafts")
    own_ids = loaded.drafter.config.aux_layer_ids == stated_ids(layer_config(loaded.config))
    if recorded and (own_ids or aux_layer_ids is None):  # not other ids on purpose
        try:
            check_drafts(recorded, loaded.drafter, loaded.embed_tokens)
        except UserError as error:
            raise UserError(field, directory, str(error)) from None
    return loaded


def validate_export(directory: Path, spec: TargetSpec) -> tuple[str, ...]:
    """Check an export or a published checkpoint for serving this target; return the notes on it.

    Raises:
        UserError: what `open_published` raises, or it was trained for other weights or another tokenizer.
    """
    parts = load_target_parts(spec)
    loaded = open_published(directory, parts, None, "export")
    check_trained_for(loaded, parts)
    tokenizer = (loaded.config.get("eagle31") or {}).get("tokenizer_fingerprint")
    if tokenizer and tokenizer != (found := tokenizer_fingerprint(load_tokenizer(spec))):
        remedy = f"The target has {found[:12]}: it is the wrong tokenizer, whose ids have another meaning."
        raise UserError("tokenizer_fingerprint", tokenizer[:12], remedy)
    positions = loaded.drafter.config.max_position_embeddings
    needed = parts.config.get_text_config().max_position_embeddings
    if positions >= needed:
        return loaded.notes
    note = (
        f"max_position_embeddings={positions:,}, but the target has {needed:,} positions: from there on few "
        "drafts are accepted, or none; train on with drafter.init_from, or serve no longer texts."
    )
    return (*loaded.notes, note)


def check_trained_for(loaded: LoadedExport, parts: TargetParts) -> None:
    """Raise UserError for an export of this project that was trained for other weights."""
    weights = (loaded.config.get("eagle31") or {}).get("target_fingerprint")
    if weights and comparable_fingerprints(weights, parts.fingerprint) and weights != parts.fingerprint:
        remedy = f"The target has {parts.fingerprint[:18]}: it is another one, or another revision."
        raise UserError("target_fingerprint", weights[:18], remedy)


def target_defaults(parts: TargetParts) -> TargetDefaults:
    return TargetDefaults(parts.num_layers, parts.embed_tokens, parts.head.weight)


def check_finite(loaded: LoadedExport, directory: Path, field: str) -> None:
    """Raise UserError if a weight is infinite or NaN: nothing can be drafted with it, or trained from it."""
    for name, weight in {**loaded.drafter.state_dict(), "embed_tokens.weight": loaded.embed_tokens}.items():
        num_damaged = weight.numel() - int(weight.isfinite().sum())
        if num_damaged:
            remedy = (
                f"{num_damaged:,} of the {weight.numel():,} values of its {name} are not finite, so the "
                "checkpoint is damaged or its training diverged; choose another."
            )
            raise UserError(field, directory, remedy)


def starting_ids(directory: Path, recipe: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the aux layer ids for `open_published`: the recipe's, or None for those of the checkpoint.

    Ids that are each one more than the checkpoint's mean the same layers: it counts layer outputs.

    Raises:
        UserError: recipe and checkpoint contradict each other.
    """
    stated = stated_ids(layer_config(read_raw_config(directory)))
    if recipe is None or not stated or tuple(recipe) in (stated, tuple(i + 1 for i in stated)):
        return None if recipe is None else tuple(recipe)
    raise _conflict("aux_layer_ids", list(recipe), list(stated), directory)


def starting_config(
    recipe: DrafterShape, checkpoint: DrafterConfig, target: PreTrainedConfig
) -> DrafterConfig:
    """Return the checkpoint's configuration with the recipe's fc_norm, norm_output, window and positions.

    Without a setting, a checkpoint with fewer positions gets those of the target, as vLLM's runner V1 drafts
    no further; not with YaRN, whose scaling ends where the positions do.

    Args:
        target: the target's text config.

    Raises:
        UserError: the recipe sets another value that differs from the checkpoint's.
    """
    attention = Attention(checkpoint.attention.name)
    found = vars(checkpoint) | {"rope_parameters": checkpoint.served_rope, "attention": attention}
    found |= vars(checkpoint.attention) | {"aux_layer_ids": list(checkpoint.aux_layer_ids)}
    if (recipe.method is Method.dspark) != (checkpoint.dspark is not None):
        has = Method.eagle if checkpoint.dspark is None else Method.dspark
        raise _conflict("method", recipe.method.value, has.value, recipe.init_from)
    if (dspark := checkpoint.dspark) is not None:
        found |= vars(dspark) | {"block_size": dspark.size}
    given = vars(recipe)
    for name in given.keys() & found.keys() - _FREE:
        if given[name] not in (None, {}) and not _agree(given[name], found[name]):
            raise _conflict(name, given[name], found[name], recipe.init_from)
    window = recipe.sliding_window or checkpoint.sliding_window
    positions = checkpoint.max_position_embeddings
    if checkpoint.served_rope["rope_type"] != "yarn":
        positions = max(positions, target.max_position_embeddings)
    return replace(
        checkpoint,
        fc_norm=recipe.fc_norm,
        norm_output=recipe.norm_output,
        sliding_window=sliding_window(replace(recipe, attention=attention, sliding_window=window), target),
        max_position_embeddings=recipe.max_position_embeddings or positions,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
    )


def starting_notes(config: DrafterConfig, loaded: LoadedExport, parts: TargetParts) -> list[str]:
    """Return what the user should know about the checkpoint that training starts from."""
    checkpoint = loaded.drafter.config
    notes = list(loaded.notes)
    for name in sorted(_FREE):
        found, chosen = getattr(checkpoint, name), getattr(config, name)
        if found != chosen:
            fresh = "; its new weights are ones" if name == "fc_norm" and chosen else ""
            notes.append(f"{name} changes from {found} to {chosen}{fresh}.")
    same_width = checkpoint.hidden_size == parts.hidden_size
    if same_width and not torch.equal(loaded.embed_tokens, parts.embed_tokens.float()):
        notes.append("its embedding differs from the target's; the target's is used.")
    return notes


def start_from(drafter: Drafter, checkpoint: Drafter) -> None:
    """Copy the checkpoint's weights into the drafter; an fc_norm that it lacks stays one."""
    missing, unexpected = drafter.load_state_dict(checkpoint.state_dict(), strict=False)
    others = [name for name in missing if not name.startswith("fc_norm.")]
    # A head that is not trained is no part of the drafter.
    others += [name for name in unexpected if not name.startswith(("fc_norm.", "lm_head."))]
    assert not others, others


def starting_vocab(loaded: LoadedExport, token_counts: Tensor) -> DraftVocab:
    """Return the checkpoint's draft vocabulary.

    Args:
        token_counts: int64 [V], occurrences among the assistant's tokens.

    Raises:
        UserError: the target ids of its d2t do not ascend.
    """
    config = loaded.drafter.config
    ids = loaded.draft_target_ids
    if ids is None:
        ids = torch.arange(config.vocab_size)
    if (ids.diff() <= 0).any():
        raise UserError(
            "drafter.init_from", "d2t", "Its target ids do not ascend; such a map is not supported."
        )
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return DraftVocab(ids - torch.arange(len(ids)), t2d, coverage(token_counts, t2d))


def _agree(given: Any, found: Any) -> bool:
    if isinstance(given, dict):
        return all(found.get(key) == value for key, value in given.items())
    return given == found


def _conflict(name: str, given: object, found: object, checkpoint: object) -> UserError:
    remedy = f"drafter.init_from={checkpoint} has {found}; give the same, or start from no checkpoint."
    return UserError(f"drafter.{name}", given, remedy)
