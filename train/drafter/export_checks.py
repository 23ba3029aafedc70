"""Holds an export against its target and against what training recorded, without vLLM."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from data.target.parts import TargetParts, load_target_parts
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer, tokenizer_fingerprint
from eagle31.errors import UserError
from eagle31.export.layouts import IDS, layer_config, layout_of, read_raw_config, read_tensors
from eagle31.export.published_config import is_latent, read_config
from eagle31.export.reload import reload_in_fresh_process
from eagle31.export.rules import Finding, finding, mapping_findings, schema_findings, tensor_findings
from eagle31.export.verification import PROBE, TrainingRecord, read_probe, read_record, tensor_hashes
from eagle31.model.config import DrafterConfig, MlaShape
from eagle31.model.rope import Rotary

# Of the largest logit. float32 sums of another order differ by 1e-6 or so; the mistakes looked for, by 1e-2.
RELOAD_TOLERANCE = 1e-4
ROPE_TOLERANCE = 1e-5
ROPE_SAMPLES = 512
_AGAIN = "Export again from the training run."

# Of a DrafterConfig's fields that config.json has under other names, or that are compared by what they do.
_PUBLISHED_NAMES = {"aux_layer_ids": IDS, "rope_parameters": "scale of the scores"}

_T = TypeVar("_T")


def validate_export(directory: Path, spec: TargetSpec) -> list[Finding]:
    """Everything that is wrong with an export, or with a published checkpoint, for serving this target.

    A checkpoint without a verification record gets the checks that need none.

    Raises:
        UserError: the target itself can not be read.
    """
    parts = load_target_parts(spec)
    findings: list[Finding] = []
    raw = _attempt(findings, lambda: read_raw_config(directory))
    tensors = _attempt(findings, lambda: read_tensors(directory))
    record = _attempt(findings, lambda: read_record(directory))
    if raw is None:
        return findings
    ours = record is not None or "eagle31" in raw
    if ours:
        findings += _attempt(findings, lambda: schema_findings(raw)) or []
    findings += provenance_findings(raw, record, spec, parts)
    read = _attempt(findings, lambda: read_config(raw, num_target_layers=parts.num_layers))
    if read is None:
        return findings
    config = read.config
    findings += target_findings(config, parts)
    if record is not None:
        findings += config_findings(config, record.config)
        findings += rope_findings(raw, record.config)
    if tensors is None:
        return findings
    optional = frozenset() if ours else optional_tensors(config)
    findings += tensor_findings(tensors, config, layout_of(raw), optional)
    findings += mapping_findings(tensors, config)
    if ours:
        findings += embedding_findings(tensors, parts)
    if record is not None:
        findings += hash_findings(tensors, record)
        findings += reload_findings(directory)
    return findings


def require_valid(directory: Path, spec: TargetSpec) -> None:
    """Raises UserError with every finding."""
    findings = validate_export(directory, spec)
    if findings:
        lines = "\n".join(f"  {one}" for one in findings)
        raise UserError("export", directory, f"It would not be served as it was trained:\n{lines}")


def optional_tensors(config: DrafterConfig) -> frozenset[str]:
    """What a published checkpoint may leave to its target in vLLM."""
    embedding = {"embed_tokens.weight"} if config.hidden_size == config.target_hidden_size else set()
    head = set() if config.pruned else {"lm_head.weight"}
    # vLLM does not read t2d.
    return frozenset(embedding | head | {"t2d"})


def target_findings(config: DrafterConfig, parts: TargetParts) -> list[Finding]:
    """The sizes and layers that the drafter assumes of its target."""
    remedy = "This is an export for another target; give the target it was trained for."
    findings = [
        finding(name, getattr(config, name), expected, remedy)
        for name, expected in (
            ("vocab_size", parts.vocab_size),
            ("target_hidden_size", parts.hidden_size),
        )
        if getattr(config, name) != expected
    ]
    if not 0 <= config.aux_layer_ids[0] <= config.aux_layer_ids[-1] <= parts.num_layers:
        expected = f"ids within 0..{parts.num_layers}"
        findings.append(finding(IDS, list(config.aux_layer_ids), expected, remedy))
    return findings


def provenance_findings(
    raw: dict[str, Any], record: TrainingRecord | None, spec: TargetSpec, parts: TargetParts
) -> list[Finding]:
    """The target's weights and its tokenizer against those of training."""
    written = raw.get("eagle31") or {}
    trained = record.target if record is not None else {}
    own = trained.get("fingerprint") or written.get("target_fingerprint")
    own_tokenizer = trained.get("tokenizer_fingerprint") or written.get("tokenizer_fingerprint")
    findings = []
    # A hub model is known by its commit, a directory by a hash of its files: one says nothing of the other.
    if own and len(own) == len(parts.fingerprint) and own != parts.fingerprint:
        remedy = "This is an export for another target, or for another revision of it; give the right one."
        findings.append(finding("target_fingerprint", parts.fingerprint[:12], own[:12], remedy))
    if own_tokenizer:
        found = tokenizer_fingerprint(load_tokenizer(spec))
        if found != own_tokenizer:
            remedy = "wrong tokenizer: the target's differs from the one of training, so ids mean other text."
            findings.append(finding("tokenizer_fingerprint", found[:12], own_tokenizer[:12], remedy))
    return findings


def config_findings(served: DrafterConfig, trained: DrafterConfig) -> list[Finding]:
    """config.json against what training recorded, field by field.

    RoPE is compared by its tables elsewhere, and here by the temperature that YaRN gives the scores of MLA.
    """
    findings = []
    for field in fields(DrafterConfig):
        found, expected = getattr(served, field.name), getattr(trained, field.name)
        if field.name == "rope_parameters":
            found, expected = served.attention_scale, trained.attention_scale
        if found != expected:
            remedy = f"It was trained with the other value. {_AGAIN}"
            name = _PUBLISHED_NAMES.get(field.name, field.name)
            findings.append(finding(name, _plain(found), _plain(expected), remedy))
    return findings


def rope_findings(raw: dict[str, Any], trained: DrafterConfig) -> list[Finding]:
    """RoPE's cos and sin, as transformers and vLLM make them from config.json, against training's."""
    layer = layer_config(raw)
    keys = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    rope = {key: layer[key] for key in ("rope_theta", "rope_scaling", "rope_parameters") if layer.get(key)}
    given = {key: layer[key] for key in keys if layer.get(key) is not None} | rope
    embedding: nn.Module
    if is_latent(layer):
        width = layer.get("qk_rope_head_dim", trained.rotary_width)
        embedding = DeepseekV3RotaryEmbedding(DeepseekV3Config(**given, qk_rope_head_dim=width))
    else:
        own_width = {"head_dim": layer["head_dim"]} if layer.get("head_dim") else {}
        embedding = LlamaRotaryEmbedding(LlamaConfig(**given, **own_width))
    longest = trained.max_position_embeddings
    positions = torch.linspace(0, longest - 1, min(ROPE_SAMPLES, longest)).round().long()
    rotary = Rotary(trained.rotary_width, trained.rope_parameters, longest)
    table = embedding(torch.empty(0), positions[None])
    pairs = list(zip([one.squeeze(0) for one in table], rotary(positions), strict=True))
    same_shape = all(ours.shape == own.shape for ours, own in pairs)
    if same_shape and all((ours - own).abs().max() <= ROPE_TOLERANCE for ours, own in pairs):
        return []
    remedy = f"Its cos and sin are not those of training. {_AGAIN}"
    return [finding("rope_parameters", rope or "none", trained.served_rope, remedy)]


def embedding_findings(tensors: Mapping[str, Tensor], parts: TargetParts) -> list[Finding]:
    """The target's own bytes where the widths are equal; a projection is known by its hash in the record."""
    embed_tokens = tensors.get("embed_tokens.weight")
    if embed_tokens is None or embed_tokens.shape != parts.embed_tokens.shape:
        return []
    if torch.equal(embed_tokens, parts.embed_tokens.to(embed_tokens.dtype)):
        return []
    num_rows = int((embed_tokens != parts.embed_tokens.to(embed_tokens.dtype)).any(dim=1).sum())
    found = f"{num_rows} of {len(embed_tokens)} rows that differ"
    return [finding("embed_tokens.weight", found, "the target's own", _AGAIN)]


def hash_findings(tensors: Mapping[str, Tensor], record: TrainingRecord) -> list[Finding]:
    """Tensors with other bytes, or other names, than training wrote."""
    findings = []
    hashes = tensor_hashes(tensors)
    for name in sorted(set(hashes) & set(record.tensors)):
        if hashes[name] != record.tensors[name]:
            remedy = f"These are not the trained bytes. {_AGAIN}"
            found, expected = f"sha256 {hashes[name][:12]}", f"sha256 {record.tensors[name][:12]}"
            findings.append(finding(name, found, expected, remedy))
    return findings


def reload_findings(directory: Path) -> list[Finding]:
    """What a fresh process drafts on the probe, against what training drafted."""
    findings: list[Finding] = []
    if _attempt(findings, lambda: read_probe(directory)) is None:
        missing = finding(PROBE, "none", "what training drafted", _AGAIN)
        return findings or [missing]
    difference = _attempt(findings, lambda: reload_in_fresh_process(directory))
    if difference is not None and not difference.largest <= RELOAD_TOLERANCE * difference.scale:
        found = f"logits off by up to {difference.largest:.2g}, most at speculation step {difference.step}"
        expected = f"at most {RELOAD_TOLERANCE * difference.scale:.2g}"
        findings.append(finding("reload", found, expected, f"Served, it would draft otherwise. {_AGAIN}"))
    return findings


def _attempt(findings: list[Finding], read: Callable[[], _T]) -> _T | None:
    """What can not be read is a finding among the others."""
    try:
        return read()
    except UserError as error:
        findings.append(finding(error.field, error.value, "what can be read", error.remedy))
        return None


def _plain(value: object) -> object:
    if isinstance(value, MlaShape):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value
