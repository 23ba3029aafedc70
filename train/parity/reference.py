"""The evaluator's side: the drafter as it was trained, with the target in transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.progress import tracked
from data.target.cached_decoding import TargetDecoder
from data.target.loading import load_target
from data.target.modules import locate
from data.target.parts import TargetParts
from data.target.spec import TargetSpec
from eagle31.decoding.speculative import Decoded, decode_speculatively
from eagle31.errors import UserError
from eagle31.export.layouts import parameter_name, read_raw_config, read_tensors
from eagle31.export.published_config import read_config
from eagle31.export.read import TargetDefaults, draft_target_ids, load_export
from eagle31.export.verification import read_record, tensor_hash
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts, project_width


@dataclass(frozen=True)
class ReferenceDrafter:
    """A drafter that the evaluator runs."""

    drafter: Drafter
    frozen: FrozenParts
    config: DrafterConfig
    source: str  # names what it was built from
    notes: tuple[str, ...] = ()


def drafter_config(export: Path, parts: TargetParts) -> DrafterConfig:
    """Return the trained drafter's config from the export's record, or else the one of its config.json."""
    record = read_record(export)
    if record is not None:
        return record.config
    return read_config(read_raw_config(export), num_target_layers=parts.num_layers).config


def reference_drafter(
    export: Path, parts: TargetParts, device: torch.device, dtype: torch.dtype
) -> ReferenceDrafter:
    """Return the drafter that serving is compared with.

    If the export has a record of its training, shape and flags come from the record, the draft vocabulary
    from t2d, and a changed embedding is restored from the target. A mistake in config.json, d2t or
    embed_tokens then shows as a difference instead of affecting both sides. A published checkpoint is read as
    it is.

    Raises:
        UserError: a file or a tensor is missing or damaged.
    """
    record = read_record(export)
    if record is None:
        defaults = TargetDefaults(parts.num_layers, parts.embed_tokens, parts.head.weight)
        loaded = load_export(export, device, dtype, target=defaults)
        frozen = FrozenParts(loaded.embed_tokens, parts.head, loaded.draft_target_ids, lm_head=None)
        source = "the checkpoint's config.json (it has no record of its training)"
        return ReferenceDrafter(loaded.drafter, frozen, loaded.drafter.config, source, loaded.notes)
    config = record.config
    tensors = {parameter_name(name): tensor for name, tensor in read_tensors(export).items()}
    embed_tokens = tensors.pop("embed_tokens.weight", None)
    if embed_tokens is None or tensor_hash(embed_tokens) != record.tensors["embed_tokens.weight"]:
        embed_tokens = project_width(parts.embed_tokens, config.hidden_size)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    drafter = Drafter(config)
    missing, unexpected = drafter.load_state_dict(tensors, strict=False)
    if missing or unexpected:
        remedy = "The trained drafter cannot be rebuilt because of these tensors; export again."
        raise UserError("export", ", ".join([*missing, *unexpected]), remedy)
    drafter.to(device=device, dtype=dtype).requires_grad_(False)
    ids = _trained_ids(config, d2t, t2d)
    frozen = FrozenParts(
        embed_tokens.to(device=device, dtype=dtype),
        parts.head,
        None if ids is None else ids.to(device),
        lm_head=None,
    )
    return ReferenceDrafter(drafter, frozen, config, "the record of its training")


def decode_reference(
    reference: ReferenceDrafter,
    spec: TargetSpec,
    prompts: Sequence[Sequence[int]],
    device: torch.device,
    *,
    k: int,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
) -> list[Decoded]:
    """Decode each prompt greedily with the drafter; keep drafts and margins."""
    model = load_target(spec, device)
    target = TargetDecoder(model, locate(model, spec), reference.config.aux_layer_ids)
    return [
        decode_speculatively(
            target,
            reference.drafter,
            reference.frozen,
            prompt,
            draft_tokens=k,
            max_new_tokens=max_new_tokens,
            eos_token_ids=stop_token_ids,
        )
        for prompt in tracked(prompts, "evaluator", "prompts")
    ]


def _trained_ids(
    config: DrafterConfig, d2t: torch.Tensor | None, t2d: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the draft vocabulary's ids, int64 [Vd]; unlike offsets, the mask t2d cannot be misread."""
    if config.pruned and t2d is not None and int(t2d.sum()) == config.draft_vocab_size:
        return t2d.nonzero().squeeze(1)
    return draft_target_ids(d2t, config)
