"""Tiny exports, and changes to them as others publish checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle31.export.config_json import config_json
from eagle31.export.drafts import draft_logits
from eagle31.export.layouts import Layout, Verifier
from eagle31.export.read import LoadedExport
from eagle31.export.write import write_export
from eagle31.model.config import DrafterConfig
from eagle31.model.vocab import build_draft_vocab
from tests.eagle31.tiny import VOCAB, random_batch, tiny_config, tiny_drafter

VERIFIER = Verifier("org/target", ("Qwen3ForCausalLM",), 3)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 16.0,
}
LATENT_YARN = {
    **{"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def written(config: DrafterConfig, layout: Layout = Layout.vllm) -> dict[str, Any]:
    return json.loads(json.dumps(config_json(config, layout, "float32", VERIFIER)))


def export(directory: Path, layout: Layout = Layout.vllm, **changes: Any) -> torch.Tensor:
    """Write an export and return what the drafter drafts on a fixed batch."""
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config, torch.float32)
    counts = torch.arange(VOCAB)
    vocab = build_draft_vocab(counts, config.draft_vocab_size, [0])
    state = {name: p.detach() for name, p in drafter.named_parameters()}
    common: dict[str, Any] = {"dtype": "float32", "provenance": {}, "verifier": VERIFIER}
    write_export(directory, config, state, vocab, frozen.embed_tokens, layout=layout, **common)
    return drafted(LoadedExport(drafter, frozen.embed_tokens, None, {}))


def drafted(loaded: LoadedExport) -> torch.Tensor:
    batch = random_batch((24,), loaded.drafter.config, dtype=torch.float32)
    return draft_logits(loaded.drafter, loaded.embed_tokens, batch, torch.arange(8), 3)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def rename(directory: Path, rule: Any) -> None:
    path = directory / "model.safetensors"
    save_file({rule(name): tensor for name, tensor in load_file(path).items()}, path)
