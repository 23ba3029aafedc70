"""Acceptance of kept weights by replay, for each held-out prompt; the same for all sides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from data.batches.loader import pack_row
from data.samples import CapturedSample
from eagle31.decoding.replay import replay
from eagle31.export.write import write_export
from eagle31.json_files import read_json, write_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.vocab import DraftVocab
from eagle31.training.batch import PackedBatch
from eagle31.training.step import greedy_hits
from train.artifact import Artifact
from train.bench.quality.dataset import Dataset, load_vocab, open_test
from train.bench.quality.runs import Run
from train.drafter.build import build_drafter
from train.drafter.published import open_published

MAX_DRAFT_TOKENS = 8
_ROW_TOKENS = 2048
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
    rows = list(packed([store[index] for index in range(len(store))]))
    measured = {}
    for kept in result["kept"]:
        drafter, frozen = drafter_of(dataset, own, directory / kept["checkpoint"])
        measured[str(kept["step"])] = prompt_counts(drafter, frozen, rows)
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


def packed(samples: Sequence[CapturedSample]) -> Iterator[PackedBatch]:
    """Yield the samples in order, as many in a row as fit."""
    row: list[CapturedSample] = []
    for sample in (*samples, None):
        num_tokens = sum(len(one.input_ids) for one in row)
        if row and (sample is None or num_tokens + len(sample.input_ids) > _ROW_TOKENS):
            yield pack_row(row, num_tokens)
            row = []
        if sample is not None:
            row.append(sample)


@torch.no_grad()
def prompt_counts(
    drafter: Drafter, frozen: FrozenParts, rows: Sequence[PackedBatch]
) -> dict[str, list[list[int]]]:
    """Return `drafts` and `accepted`, each by draft length 1 to `MAX_DRAFT_TOKENS` and prompt."""
    counts: dict[str, list[list[int]]] = {
        name: [[] for _ in range(MAX_DRAFT_TOKENS)] for name in ("drafts", "accepted")
    }
    for batch in rows:
        batch = batch.to(torch.device("cpu"), torch.float32)
        hits, supervised = greedy_hits(drafter, frozen, batch, MAX_DRAFT_TOKENS)
        for of_prompt in documents(batch):
            for k in range(1, MAX_DRAFT_TOKENS + 1):
                stats = replay(hits[of_prompt], supervised[of_prompt], k)
                counts["drafts"][k - 1].append(stats.num_drafts)
                counts["accepted"][k - 1].append(stats.num_accepted)
    return counts


def documents(batch: PackedBatch) -> Iterator[Tensor]:
    """Yield the rows of each document, bool [T]."""
    for document in range(int(batch.document_ids.max()) + 1):
        yield batch.document_ids == document


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
