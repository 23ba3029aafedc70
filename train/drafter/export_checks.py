"""Checks of an export against its target and against the training record, without vLLM."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from data.target.checkpoint import comparable_fingerprints
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

# Relative to the largest logit. float32 sums in another order differ by about 1e-6, real mistakes by 1e-2.
RELOAD_TOLERANCE = 1e-4
ROPE_TOLERANCE = 1e-5
ROPE_SAMPLES = 512
_AGAIN = "Export again from the training run."

# Fields of DrafterConfig that have another name in config.json, or that are compared by their effect.
_PUBLISHED_NAMES = {"aux_layer_ids": IDS, "rope_parameters": "scale of the scores"}

_T = TypeVar("_T")


def validate_export(directory: Path, spec: TargetSpec) -> list[Finding]:
    """Return everything that is wrong with an export or a published checkpoint for serving this target.

    A checkpoint without a training record gets only the checks that do not need it.

    Raises:
        UserError: the target cannot be read.
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
    """Raise UserError with every finding."""
    findings = validate_export(directory, spec)
    if findings:
        lines = "\n".join(f"  {one}" for one in findings)
        raise UserError("export", directory, f"vLLM would not serve it as it was trained:\n{lines}")


def check_unchanged(directory: Path, field: str) -> None:
    """Compare an export's configuration and weights with its training record, if it has one.

    Raises:
        UserError: they were changed since; names what differs.
    """
    record = read_record(directory)
    if record is None:
        return
    raw, tensors = read_raw_config(directory), read_tensors(directory)
    missing = sorted(record.tensors.keys() - tensors.keys())
    findings = [finding(name, "no such tensor", "the trained one", _AGAIN) for name in missing]
    findings += config_findings(read_config(raw).config, record.config)
    findings += rope_findings(raw, record.config)
    findings += hash_findings(tensors, record)
    if findings:
        remedy = "It was changed since it was exported; if that is meant, delete its verification/ first."
        raise UserError(field, directory, " ".join([remedy, *map(str, findings)]))


def optional_tensors(config: DrafterConfig) -> frozenset[str]:
    """Return the tensors that a published checkpoint may omit: vLLM takes the target's, or needs none."""
    embedding = {"embed_tokens.weight"} if config.hidden_size == config.target_hidden_size else set()
    head = set() if config.pruned else {"lm_head.weight"}
    # vLLM does not read t2d.
    return frozenset(embedding | head | {"t2d"})


def target_findings(config: DrafterConfig, parts: TargetParts) -> list[Finding]:
    """Compare the sizes and layers that the drafter expects with the target's."""
    remedy = "This is an export for another target; give the target that it was trained for."
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
    """Compare the target's weights and tokenizer with those of training."""
    written = raw.get("eagle31") or {}
    trained = record.target if record is not None else {}
    weights = trained.get("fingerprint") or written.get("target_fingerprint")
    tokenizer = trained.get("tokenizer_fingerprint") or written.get("tokenizer_fingerprint")
    findings = []
    if weights and comparable_fingerprints(weights, parts.fingerprint) and weights != parts.fingerprint:
        remedy = "This is an export for another target, or for another revision of it; give the right one."
        findings.append(finding("target_fingerprint", parts.fingerprint[:18], weights[:18], remedy))
    if tokenizer:
        found = tokenizer_fingerprint(load_tokenizer(spec))
        if found != tokenizer:
            remedy = (
                "wrong tokenizer: the target's differs from the one in training, so ids have another meaning."
            )
            findings.append(finding("tokenizer_fingerprint", found[:12], tokenizer[:12], remedy))
    return findings


def config_findings(served: DrafterConfig, trained: DrafterConfig) -> list[Finding]:
    """Compare config.json with the training record, field by field.

    `rope_findings` compares RoPE's tables; here only the scale that YaRN gives MLA's scores is compared.
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
    """Compare RoPE's cos and sin, computed from config.json as vLLM does, with those of training."""
    layer = layer_config(raw)
    keys = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    rope = {key: layer[key] for key in ("rope_theta", "rope_scaling", "rope_parameters") if layer.get(key)}
    given = {key: layer[key] for key in keys if layer.get(key) is not None} | rope
    embedding: nn.Module
    if is_latent(layer):
        width = layer.get("qk_rope_head_dim", trained.rotary_width)
        embedding = DeepseekV3RotaryEmbedding(DeepseekV3Config(**given, qk_rope_head_dim=width))
    else:
        head_width = {"head_dim": layer["head_dim"]} if layer.get("head_dim") else {}
        embedding = LlamaRotaryEmbedding(LlamaConfig(**given, **head_width))
    longest = trained.max_position_embeddings
    positions = torch.linspace(0, longest - 1, min(ROPE_SAMPLES, longest)).round().long()
    rotary = Rotary(trained.rotary_width, trained.rope_parameters, longest)
    table = embedding(torch.empty(0), positions[None])
    pairs = list(zip([one.squeeze(0) for one in table], rotary(positions), strict=True))
    same_shape = all(served.shape == trained.shape for served, trained in pairs)
    if same_shape and all((served - trained).abs().max() <= ROPE_TOLERANCE for served, trained in pairs):
        return []
    remedy = f"Its cos and sin differ from those in training. {_AGAIN}"
    return [finding("rope_parameters", rope or "none", trained.served_rope, remedy)]


def embedding_findings(tensors: Mapping[str, Tensor], parts: TargetParts) -> list[Finding]:
    """Compare the embedding with the target's; `hash_findings` covers projections to another width."""
    embed_tokens = tensors.get("embed_tokens.weight")
    if embed_tokens is None or embed_tokens.shape != parts.embed_tokens.shape:
        return []
    if torch.equal(embed_tokens, parts.embed_tokens.to(embed_tokens.dtype)):
        return []
    num_rows = int((embed_tokens != parts.embed_tokens.to(embed_tokens.dtype)).any(dim=1).sum())
    found = f"{num_rows} of {len(embed_tokens)} rows that differ"
    return [finding("embed_tokens.weight", found, "the target's rows", _AGAIN)]


def hash_findings(tensors: Mapping[str, Tensor], record: TrainingRecord) -> list[Finding]:
    """Compare the bytes of each tensor with the hash in the training record."""
    findings = []
    hashes = tensor_hashes(tensors)
    for name in sorted(set(hashes) & set(record.tensors)):
        if hashes[name] != record.tensors[name]:
            remedy = f"These bytes are not the trained ones. {_AGAIN}"
            found, expected = f"sha256 {hashes[name][:12]}", f"sha256 {record.tensors[name][:12]}"
            findings.append(finding(name, found, expected, remedy))
    return findings


def reload_findings(directory: Path) -> list[Finding]:
    """Compare what a fresh process drafts on the probe with what training drafted."""
    findings: list[Finding] = []
    if _attempt(findings, lambda: read_probe(directory)) is None:
        missing = finding(PROBE, "none", "what training drafted", _AGAIN)
        return findings or [missing]
    difference = _attempt(findings, lambda: reload_in_fresh_process(directory))
    if difference is not None and not difference.largest <= RELOAD_TOLERANCE * difference.scale:
        found = f"logits that differ by {difference.largest:.2g}, most at speculation step {difference.step}"
        expected = f"at most {RELOAD_TOLERANCE * difference.scale:.2g}"
        findings.append(
            finding("reload", found, expected, f"It would draft differently when served. {_AGAIN}")
        )
    return findings


def _attempt(findings: list[Finding], read: Callable[[], _T]) -> _T | None:
    """Call `read`; an error becomes a finding."""
    try:
        return read()
    except UserError as error:
        findings.append(finding(error.field, error.value, "a readable file", error.remedy))
        return None


def _plain(value: object) -> object:
    if isinstance(value, MlaShape):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value
