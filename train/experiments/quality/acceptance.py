"""Acceptance of kept weights by replay, for each held-out prompt; the same for all sides."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle31.export.write import write_export
from eagle31.json_files import read_json, write_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.vocab import DraftVocab
from train.artifact import Artifact
from train.drafter.build import build_drafter
from train.drafter.published import open_published
from train.evaluation.replay import packed, replay_greedily
from train.experiments.quality.dataset import Dataset, load_vocab, open_test
from train.experiments.quality.runs import Run

ACCEPTANCE, SERVED = "acceptance.json", "served"


@dataclass(frozen=True)
class OwnDrafter:
    """The drafter of a run of eagle31, without trained weights yet."""

    drafter: Drafter
    frozen: FrozenParts
    vocab: DraftVocab


def measure_run(dataset: Dataset, run: Run, result: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return, for each kept step, the drafts and the accepted tokens by draft length and prompt.

    They are kept in `acceptance.json` of the run.
    """
    path = directory / ACCEPTANCE
    if path.exists():
        measured: dict[str, Any] = read_json(path)
        return measured
    capture = dataset.artifacts["capture"]
    own = None
    if not run.side.is_peer:
        artifacts = directory / "artifacts"
        inputs = Artifact("train", {}, directory / result["artifact"]).manifest["inputs"]
        capture = artifacts / inputs["capture"]
        own = own_drafter(dataset, run, load_vocab(artifacts / inputs["vocab"]))
    store = open_test(capture)
    rows = list(packed(store[index] for index in range(len(store))))
    measured = {}
    for kept in result["kept"]:
        drafter, frozen = drafter_of(dataset, own, directory / kept["checkpoint"])
        measured[str(kept["step"])] = replay_greedily(drafter, frozen, rows).counts()
    write_json(path, measured)
    return measured


def own_drafter(dataset: Dataset, run: Run, vocab: DraftVocab) -> OwnDrafter:
    config = dataset.config(run.side.overrides)
    drafter, frozen = build_drafter(
        dataset.drafter(config, len(vocab.d2t)),
        vocab,
        dataset.parts,
        None,
        train_lm_head=config.drafter.train_lm_head,
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return OwnDrafter(drafter.requires_grad_(False), frozen, vocab)


def drafter_of(dataset: Dataset, own: OwnDrafter | None, checkpoint: Path) -> tuple[Drafter, FrozenParts]:
    """Return the drafter of kept weights: eagle31's by their names there, a peer's by our importer."""
    if own is not None:
        own.drafter.load_state_dict(load_file(checkpoint))
        return own.drafter, own.frozen
    loaded = open_published(checkpoint, dataset.parts, None, "checkpoint")
    frozen = FrozenParts(loaded.embed_tokens, dataset.parts.head, loaded.draft_target_ids, lm_head=None)
    return loaded.drafter, frozen


def served_checkpoint(dataset: Dataset, run: Run, result: dict[str, Any], directory: Path) -> Path:
    """Return the last kept weights as a checkpoint that vLLM loads."""
    last = directory / result["kept"][-1]["checkpoint"]
    if run.side.is_peer:
        return last
    inputs = Artifact("train", {}, directory / result["artifact"]).manifest["inputs"]
    own = own_drafter(dataset, run, load_vocab(directory / "artifacts" / inputs["vocab"]))
    state = own.drafter.state_dict() | load_file(last)
    if own.frozen.lm_head is not None:
        state["lm_head.weight"] = own.frozen.lm_head.weight
    write_export(
        directory / SERVED,
        own.drafter.config,
        state,
        own.vocab,
        own.frozen.embed_tokens,
        dtype="float32",
        provenance={"target": str(dataset.target)},
    )
    return directory / SERVED
