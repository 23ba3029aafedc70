"""A complete export of a tiny drafter for a tiny target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer, tokenizer_fingerprint
from eagle31.export.layouts import Layout, Verifier
from eagle31.export.write import write_export
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import project_width
from eagle31.model.vocab import build_draft_vocab
from tests.data.conversations.chat_templates import byte_level_tokenizer
from tests.data.target.tiny_target import AUX_LAYER_IDS, HIDDEN_SIZE, VOCAB_SIZE, save_target
from tests.eagle31.tiny import tiny_config, tiny_drafter

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def save_target_with_tokenizer(directory: Path, template: str | None = None) -> TargetSpec:
    spec = save_target(directory)
    byte_level_tokenizer(template).save_pretrained(directory)
    return spec


def export_config(**changes: Any) -> DrafterConfig:
    defaults = {
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": 40,
        "target_hidden_size": HIDDEN_SIZE,
        "aux_layer_ids": AUX_LAYER_IDS,
        "rope_parameters": LLAMA3,
        "max_position_embeddings": 512,
    }
    return tiny_config(**defaults | changes)


def write_tiny_export(
    directory: Path,
    spec: TargetSpec,
    *,
    layout: Layout = Layout.vllm,
    dtype: str = "float32",
    **changes: Any,
) -> Drafter:
    """Write an export, and return its drafter."""
    parts, config = load_target_parts(spec), export_config(**changes)
    drafter, _ = tiny_drafter(config, torch.float32)
    rounded = {n: p.detach().to(getattr(torch, dtype)).float() for n, p in drafter.named_parameters()}
    drafter.load_state_dict(rounded)
    drafter.requires_grad_(False)
    counts = torch.randint(0, 50, (config.vocab_size,), generator=torch.Generator().manual_seed(0))
    vocab = build_draft_vocab(counts, config.draft_vocab_size, [0])
    embed_tokens = project_width(parts.embed_tokens, config.hidden_size)
    write_export(
        directory,
        config,
        rounded,
        vocab,
        embed_tokens,
        dtype=dtype,
        layout=layout,
        provenance={
            "target_fingerprint": parts.fingerprint,
            "tokenizer_fingerprint": tokenizer_fingerprint(load_tokenizer(spec)),
        },
        verifier=Verifier(spec.model, ("LlamaForCausalLM",), 4),
    )
    return drafter


def edit_config(export: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = export / "config.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def edit_tensors(export: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = export / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def make_published(export: Path) -> None:
    """Make an export one that eagle31 did not write."""
    edit_config(export, lambda raw: raw.pop("eagle31"))
