"""What vLLM requires of a drafter's checkpoint, whatever its target: its keys, tensors and vocabulary."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle31.export.config_json import config_json
from eagle31.export.layouts import Layout, Verifier, layout_of, served_name
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter

# The target's name, and RoPE, which has several spellings: the drafts show it.
_NOT_COMPARED = {"speculators_config", "rope_scaling", "rope_theta"}


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


def schema_findings(raw: dict[str, Any], config: DrafterConfig) -> list[Finding]:
    """Compare an export's config.json with that of the drafter as which vLLM reads it.

    vLLM guesses missing keys, and reads some that are there twice in one of the places only.
    """
    expected = config_json(config, layout_of(raw), str(raw.get("torch_dtype")), Verifier("", (), 1))
    return list(_key_findings(raw, expected))


def _key_findings(found: dict[str, Any], expected: dict[str, Any], within: str = "") -> Iterator[Finding]:
    for key in expected.keys() - _NOT_COMPARED:
        if isinstance(expected[key], dict) and isinstance(found.get(key), dict):
            yield from _key_findings(found[key], expected[key], f"{within}{key}.")
        elif found.get(key) != expected[key]:
            remedy = "The other keys say something else, or vLLM would guess it; export again."
            yield finding(f"{within}{key}", found.get(key), expected[key], remedy)


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
