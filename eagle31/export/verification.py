"""A record of the trained drafter, kept with its export so that the export can be compared with it."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle31.errors import UserError
from eagle31.json_files import read_json, write_json
from eagle31.model.config import DrafterConfig, MlaShape
from eagle31.model.drafter import Drafter
from eagle31.tensor_files import load_tensors, save_tensors
from eagle31.training.batch import PackedBatch
from eagle31.training.rollout import rollout
from eagle31.training.supervision import supervised_drafts, supervised_positions

# A subdirectory: vLLM loads every safetensors file next to config.json as weights.
DIRECTORY, RECORD, PROBE = "verification", "record.json", "probe.safetensors"
FORMAT = 1
MAX_TOKENS, MAX_ROWS, TOP = 128, 16, 64
MAX_STATE_BYTES = 6_000_000


@dataclass(frozen=True)
class TrainingRecord:
    """The drafter as it was trained, and its target; none of it is read from the export."""

    config: DrafterConfig
    dtype: str  # of the exported weights
    layout: str
    step: int
    target: dict[str, Any]  # model, revision, fingerprint, tokenizer_fingerprint, template_fingerprint
    tensors: dict[str, str]  # sha256 of each tensor's bytes, by its served name

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(raw: dict[str, Any]) -> "TrainingRecord":
        """Parse a record. Raises UserError when its format is another one or keys are missing."""
        found = raw.get("format") if isinstance(raw, dict) else None
        if found != FORMAT:
            remedy = f"This version reads format {FORMAT}; export again with this version."
            raise UserError(f"{DIRECTORY}/{RECORD}:format", found, remedy)
        try:
            values = {field.name: raw[field.name] for field in fields(TrainingRecord)}
            shape = values["config"] | {"aux_layer_ids": tuple(values["config"]["aux_layer_ids"])}
            if shape.get("mla") is not None:
                shape["mla"] = MlaShape(**shape["mla"])
            return TrainingRecord(**values | {"config": DrafterConfig(**shape)})
        except (KeyError, TypeError) as error:
            raise UserError(f"{DIRECTORY}/{RECORD}", error, "It is damaged; export again.") from error


@dataclass(frozen=True)
class Probe:
    """A piece of a held-out sample, and the trained drafter's logits on it.

    R rows, K steps, the n highest logits of each.
    """

    batch: PackedBatch  # one document
    rows: Tensor  # int64 [R]
    top_ids: Tensor  # int64 [K, R, n], the draft ids of the highest logits
    top_logits: Tensor  # float32 [K, R, n]
    logsumexp: Tensor  # float32 [K, R], over the draft vocabulary


def tensor_hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the sha256 of each tensor's bytes, which are those in the file."""
    return {name: tensor_hash(tensor) for name, tensor in sorted(tensors.items())}


def tensor_hash(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def probe_piece(batch: PackedBatch, num_steps: int) -> PackedBatch | None:
    """Return a short piece of a sample around its first supervised draft; None if it has none.

    batch: one document without padding.
    """
    rows = supervised_positions(supervised_drafts(batch.loss_mask, batch.document_ids, num_steps))
    if not len(rows):
        return None
    states = batch.aux_hidden_states
    token_bytes = states.element_size() * states[0].numel() * (1 + 1 / states.shape[1])
    num_tokens = max(4, min(MAX_TOKENS, int(MAX_STATE_BYTES / token_bytes)))
    start = max(0, int(rows[0]) - num_tokens // 2)
    piece = {f.name: getattr(batch, f.name)[start : start + num_tokens] for f in fields(PackedBatch)}
    return PackedBatch(**piece | {"position_ids": piece["position_ids"] - piece["position_ids"][0]})


def make_probe(drafter: Drafter, embed_tokens: Tensor, piece: PackedBatch, num_steps: int) -> Probe:
    """Draft on the piece by the training path, in float32 on the CPU.

    Args:
        drafter: float32, with weights rounded to the export's dtype.
        embed_tokens: float32 [V, H].
    """
    supervised = supervised_drafts(piece.loss_mask, piece.document_ids, num_steps)
    rows = supervised_positions(supervised)[:MAX_ROWS]
    logits = draft_logits(drafter, embed_tokens, piece, rows, num_steps)
    top = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
    return Probe(piece, rows, top.indices, top.values, logits.logsumexp(-1))


@torch.no_grad()
def draft_logits(
    drafter: Drafter, embed_tokens: Tensor, batch: PackedBatch, rows: Tensor, num_steps: int
) -> Tensor:
    """Return the draft logits of `rows`, float32 [K, R, Vd]."""
    batch = batch.to(torch.device("cpu"), torch.float32)
    steps = rollout(drafter, embed_tokens, batch, rows, num_steps)
    return torch.stack([drafter.lm_head(normed) for normed, _ in steps])


@dataclass(frozen=True)
class Difference:
    """The largest difference between a probe and drafting on it again."""

    largest: float  # absolute difference of a logit or a logsumexp
    step: int  # 0-based speculation step
    scale: float  # the largest recorded logit by magnitude, at least 1


def replay_probe(probe: Probe, drafter: Drafter, embed_tokens: Tensor) -> Difference:
    """Draft on the probe's piece again, in float32 on the CPU as the probe was made."""
    num_steps = len(probe.top_ids)
    logits = draft_logits(drafter, embed_tokens, probe.batch, probe.rows, num_steps)
    at_top = (logits.gather(-1, probe.top_ids) - probe.top_logits).abs().amax(dim=(1, 2))
    in_sum = (logits.logsumexp(-1) - probe.logsumexp).abs().amax(dim=1)
    # NaN counts as an infinite difference.
    by_step = torch.maximum(at_top, in_sum).nan_to_num(nan=torch.inf)
    scale = max(1.0, float(probe.top_logits.abs().max()))
    return Difference(float(by_step.max()), int(by_step.argmax()), scale)


def write_verification(export: Path, record: TrainingRecord, probe: Probe | None) -> None:
    """Write `verification/` into an export's directory."""
    directory = export / DIRECTORY
    write_json(directory / RECORD, record.to_json())
    if probe is not None:
        drafts = {name: getattr(probe, name) for name in ("rows", "top_ids", "top_logits", "logsumexp")}
        batch = {f.name: getattr(probe.batch, f.name) for f in fields(PackedBatch)}
        save_tensors({n: t.cpu().contiguous() for n, t in (drafts | batch).items()}, directory / PROBE)


def read_record(export: Path) -> TrainingRecord | None:
    """Read the record; None if the checkpoint was not exported here. Raises UserError if it is damaged."""
    path = export / DIRECTORY / RECORD
    return TrainingRecord.from_json(read_json(path)) if path.exists() else None


def read_probe(export: Path) -> Probe | None:
    """Read the probe; None if there is none. Raises UserError if it is damaged."""
    path = export / DIRECTORY / PROBE
    if not path.exists():
        return None
    try:
        tensors = load_tensors(path)
        batch = PackedBatch(**{f.name: tensors.pop(f.name) for f in fields(PackedBatch)})
        return Probe(batch=batch, **tensors)
    except UserError as error:
        raise UserError(f"{DIRECTORY}/{PROBE}", path, f"It is damaged. {error.remedy}") from error
    except (OSError, KeyError, TypeError) as error:
        raise UserError(f"{DIRECTORY}/{PROBE}", path, f"It cannot be read: {error!r}") from error
