"""Drafter checkpoints, published or our own: found, held against the target, and trained further."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from data.target.checkpoint import is_hub_id
from data.target.parts import TargetParts
from eagle31.errors import UserError
from eagle31.export.layouts import layer_config, read_raw_config
from eagle31.export.published_config import read_config, stated_ids
from eagle31.export.read import LoadedExport, TargetDefaults, load_export
from eagle31.export.rules import FLAGS
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.vocab import DraftVocab
from train.config.drafter import Attention, DrafterShape
from train.drafter.export_checks import target_findings

_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "verification/*"]


def fetch_checkpoint(name: str, revision: str | None, field: str) -> Path:
    """The directory of a local checkpoint, or of a hub one, downloaded if need be.

    Raises:
        UserError: it is neither, or cannot be downloaded.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not is_hub_id(name):
        raise UserError(field, name, "No such directory; give a directory or a hub id.")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        raise UserError(field, name, f"Cannot be downloaded: {' '.join(str(error).split())}") from error


def open_published(
    directory: Path, parts: TargetParts, aux_layer_ids: Sequence[int] | None, field: str
) -> LoadedExport:
    """A checkpoint in float32 on the CPU, known to be for this target.

    Args:
        aux_layer_ids: in place of the checkpoint's own.

    Raises:
        UserError: it cannot be read, or is for another target; before its weights are.
    """
    raw = read_raw_config(directory)
    read = read_config(raw, num_target_layers=parts.num_layers, aux_layer_ids=aux_layer_ids)
    findings = target_findings(read.config, parts)
    if findings:
        raise UserError(field, directory, " ".join(map(str, findings)))
    defaults = TargetDefaults(parts.num_layers, parts.embed_tokens, parts.head.weight)
    cpu = torch.device("cpu")
    return load_export(directory, cpu, torch.float32, target=defaults, aux_layer_ids=aux_layer_ids)


def starting_ids(directory: Path, recipe: Sequence[int] | None) -> tuple[int, ...] | None:
    """The recipe's ids for `open_published`, None for the checkpoint's own.

    Ids that are each one more than the checkpoint's are its own in our count: it counts layer outputs.

    Raises:
        UserError: the two contradict each other.
    """
    stated = stated_ids(layer_config(read_raw_config(directory)))
    if recipe is None or not stated or tuple(recipe) in (stated, tuple(i + 1 for i in stated)):
        return None if recipe is None else tuple(recipe)
    raise _conflict("aux_layer_ids", list(recipe), list(stated), directory)


def starting_shape(recipe: DrafterShape, checkpoint: DrafterConfig) -> DrafterShape:
    """The recipe's shape, what it leaves null taken from the checkpoint. The norm flags stay the recipe's.

    Raises:
        UserError: the recipe sets what the checkpoint has otherwise.
    """
    given = asdict(recipe)
    own = asdict(checkpoint) | {"rope_parameters": checkpoint.served_rope}
    own["aux_layer_ids"] = list(checkpoint.aux_layer_ids)
    own["attention"] = Attention.gqa if checkpoint.mla is None else Attention.mla
    if checkpoint.mla is not None:
        own |= asdict(checkpoint.mla)
    taken: dict[str, Any] = {}
    for name in given.keys() & own.keys() - set(FLAGS):
        if given[name] in (None, {}):
            taken[name] = own[name]
        elif not _agree(given[name], own[name]):
            raise _conflict(name, given[name], own[name], recipe.init_from)
    return replace(recipe, **taken)


def starting_notes(recipe: DrafterShape, loaded: LoadedExport, parts: TargetParts) -> list[str]:
    """What a person should know of how training starts."""
    checkpoint = loaded.drafter.config
    notes = list(loaded.notes)
    for name in FLAGS:
        found, wanted = getattr(checkpoint, name), getattr(recipe, name)
        if found != wanted:
            fresh = "; its new weights are ones" if name == "fc_norm" and wanted else ""
            notes.append(f"{name} was {found} and is {wanted} from now on{fresh}.")
    same_width = checkpoint.hidden_size == parts.hidden_size
    if same_width and not torch.equal(loaded.embed_tokens, parts.embed_tokens.float()):
        notes.append("its embedding is not the target's; the target's is used from now on.")
    return notes


def start_from(drafter: Drafter, checkpoint: Drafter) -> None:
    """Copies the checkpoint's weights; an fc_norm that it has not keeps its ones."""
    missing, unexpected = drafter.load_state_dict(checkpoint.state_dict(), strict=False)
    others = [name for name in missing if not name.startswith("fc_norm.")]
    # A head that is not trained stays outside the drafter.
    others += [name for name in unexpected if not name.startswith(("fc_norm.", "lm_head."))]
    assert not others, others


def starting_vocab(loaded: LoadedExport, token_counts: Tensor) -> DraftVocab:
    """The checkpoint's own draft vocabulary.

    Args:
        token_counts: int64 [V], occurrences among the counted tokens.

    Raises:
        UserError: its ids do not ascend, as the target's rows would have to be ordered then.
    """
    config = loaded.drafter.config
    ids = loaded.draft_target_ids
    if ids is None:
        ids = torch.arange(config.vocab_size)
    if (ids.diff() <= 0).any():
        raise UserError(
            "drafter.init_from", "d2t", "Its target ids do not ascend; such a map can not be used."
        )
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    total = int(token_counts.sum())
    coverage = int(token_counts[ids].sum()) / total if total else 1.0
    return DraftVocab(ids - torch.arange(len(ids)), t2d, coverage)


def _agree(given: Any, own: Any) -> bool:
    if isinstance(given, dict):
        return all(own.get(key) == value for key, value in given.items())
    return given == own


def _conflict(name: str, given: object, own: object, checkpoint: object) -> UserError:
    remedy = (
        f"drafter.init_from={checkpoint} has {own}; leave it out to take that, or start from no checkpoint."
    )
    return UserError(f"drafter.{name}", given, remedy)
