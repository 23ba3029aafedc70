"""Trains a peer's drafter on the rows of a store, in its environment: python -I quality_peer.py DIRECTORY

It reads spec.json and target.safetensors there, and writes a checkpoint in a published layout for every kept
step, into step-*/, and kept.json at the end.
"""

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
from scripts.bench.peers import PEERS, Peer

CPU = torch.device("cpu")
Json = dict[str, Any]


def main() -> None:
    directory = Path(sys.argv[1])
    spec: Json = json.loads((directory / "spec.json").read_text())
    torch.manual_seed(0)
    kind, dtype = PEERS[spec["peer"]], getattr(torch, spec["dtype"])
    of_weights = torch.float32 if kind.autocasts else dtype
    target = {
        name: tensor.to(of_weights) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(directory / "target.safetensors").items()
    }
    peer = kind(spec, target, CPU, of_weights)
    peer.begin(spec["steps"])
    store, sizes = HiddenStateStore(Path(spec["store"])), (spec["row_tokens"], spec["rows_per_step"])
    loader = RowLoader(store, row_tokens=sizes[0], rows_per_step=sizes[1], seed=0)
    try:
        kept = train(peer, loader, dtype, directory, spec["steps"], spec["keep_every"])
    finally:
        loader.close()
    write_json(directory / "kept.json", kept)


def train(
    peer: Peer, loader: RowLoader, dtype: torch.dtype, directory: Path, steps: int, keep_every: int
) -> list[Json]:
    """Return the kept steps with their training time."""
    # What is compiled at the first use is no training.
    for row in loader.batches(0):
        loss_of(peer, tensors(row, dtype), dtype).backward()
    peer.model.zero_grad(set_to_none=True)
    loader.read_ahead(0)
    kept: list[Json] = []
    seconds, supervised = 0.0, 0
    for step in range(steps):
        started = time.perf_counter()
        rows = [tensors(row, dtype) for row in loader.batches(step)]
        counts = [int(row["loss_mask"].sum()) if peer.weighs_tokens else 1 for row in rows]
        for row, count in zip(rows, counts, strict=True):
            (loss_of(peer, row, dtype) * (count / max(sum(counts), 1))).backward()
        peer.update()
        seconds += time.perf_counter() - started
        # The positions that eagle31 counts, whichever of them the peer supervises.
        supervised += sum(
            int(supervised_drafts(row["loss_mask"], row["document_ids"], 1).sum()) for row in rows
        )
        done = step + 1
        if done % keep_every == 0 or done == steps:
            checkpoint = directory / f"step-{done:08d}"
            keep(peer, checkpoint)
            figures = {"step": done, "step_seconds": seconds, "supervised_positions": supervised}
            kept.append(figures | {"checkpoint": str(checkpoint)})
            print(f"step {done} of {steps}, {seconds:.1f} s", flush=True)
    return kept


def loss_of(peer: Peer, row: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", dtype, enabled=peer.autocasts and dtype is not torch.float32):
        return peer.loss(peer.inputs(row))


def tensors(row: PackedBatch, dtype: torch.dtype) -> dict[str, Tensor]:
    batch = row.to(CPU, dtype)
    return {field.name: getattr(batch, field.name) for field in fields(batch)}


def keep(peer: Peer, directory: Path) -> None:
    directory.mkdir()
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in peer.weights().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    peer.write_config(directory)


if __name__ == "__main__":
    main()
