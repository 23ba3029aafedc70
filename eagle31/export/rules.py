"""What vLLM requires of a drafter's checkpoint, whatever its target: its keys, tensors and vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle31.export.config_json import SLIDING
from eagle31.export.layouts import IDS, Layout, layer_config, layout_of, served_name
from eagle31.model.config import ATTENTIONS, DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.gqa import GqaShape

FLAGS = ("fc_norm", "norm_output", "norm_before_residual")


@dataclass(frozen=True)
class Finding:
    """One problem of an export."""

    field: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: found {self.found}, expected {self.expected}. {self.remedy}"


def finding(field: str, found: object, expected: object, remedy: str) -> Finding:
    """Make a finding, with values as JSON writes them: false, not False."""
    words = {True: "true", False: "false", None: "none"}
    shown = [words[v] if isinstance(v, bool) or v is None else str(v) for v in (found, expected)]
    return Finding(field, shown[0], shown[1], remedy)


def schema_findings(raw: dict[str, Any]) -> list[Finding]:
    """Find missing keys that vLLM would guess, and keys that contradict each other."""
    speculators = layout_of(raw) is Layout.speculators
    layer = layer_config(raw)
    missing = "Export again; vLLM uses its default for a missing key."
    findings = []

    def expect(field: str, found: object, expected: object, remedy: str = missing) -> None:
        if type(found) is not type(expected) or found != expected:
            findings.append(finding(field, found, expected, remedy))

    attention = next((kind for kind in ATTENTIONS.values() if {*kind.widths()} & {*layer}), GqaShape)
    architecture = "Eagle3Speculator" if speculators else attention.architectures[0]
    expect("architectures", raw.get("architectures"), [architecture])
    expect("model_type", layer.get("model_type"), attention.model_types[0])
    expect("tie_word_embeddings", raw.get("tie_word_embeddings"), False)
    for flag in FLAGS:
        if not isinstance(raw.get(flag), bool):
            findings.append(finding(flag, raw.get(flag), "true or false", missing))
    ids = raw.get(IDS)
    if not ids or ids != sorted(set(ids)):
        remedy = "vLLM guesses the layers if there are no ids, and sorts the ids if there are."
        findings.append(finding(IDS, ids, "ascending aux layer ids", remedy))
        return findings
    both = "config.json has the ids twice, for two readers; export again."
    expect(f"eagle_config.{IDS}", (layer.get("eagle_config") or {}).get(IDS), ids, both)
    expect("num_aux_hidden_states", layer.get("num_aux_hidden_states"), len(ids))
    findings += window_findings(layer)
    if speculators:
        expect(f"transformer_layer_config.{IDS}", raw["transformer_layer_config"].get(IDS), ids, both)
        for flag in FLAGS:
            expect(
                f"transformer_layer_config.{flag}",
                raw["transformer_layer_config"].get(flag),
                raw.get(flag),
                "config.json has the flags twice, for two readers; export again.",
            )
    return findings


def window_findings(layer: dict[str, Any]) -> list[Finding]:
    """Find a sliding window of which vLLM would read only a part."""
    window, types = layer.get("sliding_window"), layer.get("layer_types")
    expected = None if window is None else [SLIDING] * (layer.get("num_hidden_layers") or 1)
    if types == expected:
        return []
    remedy = "vLLM reads sliding_window only for layers of this type; export again."
    return [finding("layer_types", types, expected, remedy)]


def expected_shapes(config: DrafterConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a complete checkpoint, by its served name."""
    with torch.device("meta"):
        drafter = Drafter(config)
    shapes = {served_name(name, layout): tuple(p.shape) for name, p in drafter.named_parameters()}
    shapes["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    if config.pruned:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return shapes


def tensor_findings(
    tensors: Mapping[str, Tensor], config: DrafterConfig, layout: Layout, optional: frozenset[str]
) -> list[Finding]:
    """Find tensors that vLLM would not load, and weights that are not finite.

    Args:
        optional: served names that may be missing.
    """
    expected = {_neutral(name): (name, shape) for name, shape in expected_shapes(config, layout).items()}
    present = {_neutral(name): (name, tensor) for name, tensor in tensors.items()}
    findings = []
    for key, (name, shape) in expected.items():
        if key not in present:
            if name not in optional:
                findings.append(finding(name, "no such tensor", list(shape), "It is missing; export again."))
        elif tuple(present[key][1].shape) != shape:
            remedy = "config.json and the weights contradict each other; export again."
            findings.append(finding(name, list(present[key][1].shape), list(shape), remedy))
    for key, (name, tensor) in present.items():
        if key not in expected:
            remedy = (
                "vLLM has no such parameter; config.json does not match, or the name has an extra prefix."
            )
            findings.append(finding(name, list(tensor.shape), "no such tensor", remedy))
        elif tensor.is_floating_point() and not torch.isfinite(tensor).all():
            findings.append(finding(name, "nan or inf", "finite weights", "Export an earlier step."))
    return findings


def mapping_findings(tensors: Mapping[str, Tensor], config: DrafterConfig) -> list[Finding]:
    """Check that d2t, int64 [Vd], holds offsets from the draft ids to the ids that t2d, bool [V], selects."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if not config.pruned or d2t is None or d2t.shape != (config.draft_vocab_size,):
        return []  # `tensor_findings` checks names and shapes
    findings = []
    if d2t.dtype is not torch.int64:
        findings.append(finding("d2t", d2t.dtype, torch.int64, "Export again."))
    if t2d is not None and t2d.dtype is not torch.bool:
        findings.append(finding("t2d", t2d.dtype, torch.bool, "Export again."))
    targets = d2t.long() + torch.arange(config.draft_vocab_size)
    chosen = None if t2d is None or t2d.shape != (config.vocab_size,) else t2d.bool().nonzero().squeeze(1)
    if chosen is None:
        if targets.min() < 0 or targets.max() >= config.vocab_size or len(targets.unique()) < len(targets):
            findings.append(
                finding("d2t", "offsets that repeat or leave the vocabulary", "one to one", "Export again.")
            )
    elif not torch.equal(targets.sort().values, chosen):
        absolute = torch.equal(d2t.long().sort().values, chosen)
        found = "absolute ids" if absolute else f"{_num_different(targets, chosen)} ids that are not in t2d"
        expected = "offsets (target id - draft id) to the ids that t2d selects"
        remedy = "d2t seems to hold absolute ids; subtract each draft id." if absolute else "Export again."
        findings.append(finding("d2t", found, expected, remedy))
    return findings


def _num_different(targets: Tensor, chosen: Tensor) -> int:
    return int((~torch.isin(targets, chosen)).sum()) or len(targets) - len(targets.unique())


def _neutral(name: str) -> str:
    """Return the name with `layers.0.` for `midlayer.`, as vLLM reads it."""
    return name.replace("midlayer.", "layers.0.")
