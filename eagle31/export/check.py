"""The check of an export or a published checkpoint: it is read as vLLM reads it, and drafts."""

from pathlib import Path

import torch
from torch import Tensor

from eagle31.errors import UserError
from eagle31.export.drafts import drafts_findings
from eagle31.export.layouts import IDS, layout_of, read_raw_config, read_tensors
from eagle31.export.published_config import read_config
from eagle31.export.read import LoadedExport, TargetDefaults, load_export
from eagle31.export.rules import Finding, finding, mapping_findings, schema_findings, tensor_findings
from eagle31.model.config import DrafterConfig

CPU = torch.device("cpu")


def export_findings(directory: Path, target: TargetDefaults | None = None) -> list[Finding]:
    """Return everything that is wrong with a checkpoint for serving, if a target is given for this one."""
    findings: list[Finding] = []
    try:
        raw = read_raw_config(directory)
        guessed = target and "eagle31" not in raw  # an export has its aux layer ids
        config = read_config(raw, num_target_layers=target.num_layers if target and guessed else None).config
        findings += schema_findings(raw, config) if "eagle31" in raw else []
        if target is not None:
            findings += target_findings(config, target)
        tensors = read_tensors(directory)
        optional = frozenset() if "eagle31" in raw else _optional_tensors(config)
        findings += tensor_findings(tensors, config, layout_of(raw), optional)
        findings += mapping_findings(tensors, config)
        if "eagle31" in raw and target is not None:
            findings += _embedding_findings(tensors.get("embed_tokens.weight"), target.embed_tokens)
        if not findings:
            findings += changed_findings(load_export(directory, CPU, target=target))
    except UserError as error:
        findings.append(finding(error.field, error.value, "a readable file", error.remedy))
    return findings


def changed_findings(loaded: LoadedExport) -> list[Finding]:
    """Return how an export drafts differently than at its export, if its config.json says how it drafted.

    loaded: float32 on the CPU.
    """
    recorded = (loaded.config.get("eagle31") or {}).get("drafts")
    return drafts_findings(recorded, loaded.drafter, loaded.embed_tokens)


def target_findings(config: DrafterConfig, target: TargetDefaults) -> list[Finding]:
    """Compare the sizes and layers that the drafter expects with the target's."""
    remedy = "This is an export for another target; give the target that it was trained for."
    vocab_size, hidden_size = target.embed_tokens.shape
    findings = [
        finding(name, getattr(config, name), expected, remedy)
        for name, expected in (("vocab_size", vocab_size), ("target_hidden_size", hidden_size))
        if getattr(config, name) != expected
    ]
    if not 0 <= config.aux_layer_ids[0] <= config.aux_layer_ids[-1] <= target.num_layers:
        expected = f"ids within 0..{target.num_layers}"
        findings.append(finding(IDS, list(config.aux_layer_ids), expected, remedy))
    return findings


def _optional_tensors(config: DrafterConfig) -> frozenset[str]:
    """Return the tensors that a published checkpoint may omit: vLLM takes the target's, or needs none."""
    embedding = {"embed_tokens.weight"} if config.hidden_size == config.target_hidden_size else set()
    head = set() if config.pruned else {"lm_head.weight"}
    return frozenset(embedding | head | {"t2d"})  # vLLM does not read t2d


def _embedding_findings(found: Tensor | None, expected: Tensor) -> list[Finding]:
    """Compare the embedding with the target's, if it is not a projection to another width."""
    if found is None or found.shape != expected.shape:
        return []
    num_rows = int((found != expected.to(found.dtype)).any(dim=1).sum())
    if not num_rows:
        return []
    what = f"{num_rows} of {len(found)} rows that differ"
    return [finding("embed_tokens.weight", what, "the target's rows", "Export again.")]
