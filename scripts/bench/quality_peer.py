"""Trains a peer's drafter on the rows of a store, and keeps its weights; runs in the peer's environment.

    python -I quality_peer.py SPEC.json

It writes a checkpoint in a published layout for every kept step, into step-*/, and `result.json` at the end.
"""

import importlib.metadata
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.batches.loader import RowLoader
from data.store import HiddenStateStore
from eagle31.json_files import write_json
from eagle31.training.batch import PackedBatch, supervised_drafts
from scripts.bench.peers.peer import Peer
from scripts.bench.peers.specforge_peer import SpecForge
from scripts.bench.peers.speculators_peer import Speculators
from scripts.bench.peers.torchspec_peer import TorchSpec

Json = dict[str, Any]
TRAINERS: dict[str, type[SpecForge | Speculators | TorchSpec]] = {
    "speculators": Speculators,
    "specforge": SpecForge,
    "torchspec": TorchSpec,
    "torchspec-lk": TorchSpec,
}


def main() -> None:
    spec: Json = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(spec["seed"])
    dtype = torch.float32
    trainer = TRAINERS[spec["peer"]].trainer(spec, load_file(spec["tensors"]), dtype)
    loader = RowLoader(
        HiddenStateStore(Path(spec["store"])),
        row_tokens=spec["row_tokens"],
        rows_per_step=spec["rows_per_step"],
        seed=spec["seed"],
    )
    try:
        kept = train(trainer, loader, spec, dtype)
    finally:
        loader.close()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions[spec["peer"]] = trainer.version
    result = {"kept": kept, "defaults": trainer.defaults, "ran": trainer.ran, "versions": versions}
    write_json(Path(spec["output"]) / "result.json", result)


def train(trainer: Peer, loader: RowLoader, spec: Json, dtype: torch.dtype) -> list[Json]:
    """Train for `spec["steps"]` steps; return the kept steps with their training time."""
    # What is compiled at the first use is no training.
    for row in loader.batches(0):
        trainer.loss(trainer.inputs(tensors(row, dtype))).backward()
    trainer.model.zero_grad(set_to_none=True)
    loader.read_ahead(0)
    kept: list[Json] = []
    seconds, supervised = 0.0, 0
    for step in range(spec["steps"]):
        started = time.perf_counter()
        batches = [tensors(row, dtype) for row in loader.batches(step)]
        counts = [int(batch["loss_mask"].sum()) for batch in batches]
        for batch, weight in zip(batches, row_weights(spec["peer"], counts), strict=True):
            (trainer.loss(trainer.inputs(batch)) * weight).backward()
        trainer.update()
        seconds += time.perf_counter() - started
        supervised += sum(supervised_positions(batch) for batch in batches)
        done = step + 1
        if done % spec["keep_every"] == 0 or done == spec["steps"]:
            name = f"step-{done:08d}"
            keep(trainer, Path(spec["output"]) / name)
            figures = {"step": done, "step_seconds": seconds, "supervised_positions": supervised}
            kept.append(figures | {"checkpoint": name})
            print(f"step {done} of {spec['steps']}, {seconds:.1f} s", flush=True)
    return kept


def row_weights(peer: str, supervised: list[int]) -> list[float]:
    """Return the weight of each row's mean loss in that of a step.

    speculators takes the mean over a packed sequence, the others that over their micro-batches.
    """
    if peer == "speculators":
        total = max(sum(supervised), 1)
        return [count / total for count in supervised]
    return [1 / len(supervised)] * len(supervised)


def tensors(row: PackedBatch, dtype: torch.dtype) -> dict[str, Tensor]:
    batch = row.to(torch.device("cpu"), dtype)
    return {field.name: getattr(batch, field.name) for field in fields(batch)}


def supervised_positions(row: dict[str, Tensor]) -> int:
    """Return the positions that eagle31 counts, whichever of them the peer supervises."""
    return int(supervised_drafts(row["loss_mask"], row["document_ids"], 1).sum())


def keep(trainer: Peer, directory: Path) -> None:
    directory.mkdir(parents=True)
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in trainer.weights().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    trainer.write_config(directory)


if __name__ == "__main__":
    main()
