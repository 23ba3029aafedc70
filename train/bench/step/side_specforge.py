"""SpecForge's step, for `worker.py`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[3]


def build(
    spec: dict[str, Any], weights: dict[str, Tensor], rows: list[dict[str, Tensor]], device: torch.device
) -> tuple[nn.Module, Callable[[int], Tensor], dict[str, Any]]:
    """Return the model and its step."""
    sys.path.append(str(ROOT))
    from train.bench.peers.specforge_step import SpecForgeStep

    shape = spec["shape"]
    peer = SpecForgeStep(
        spec["llama_config"],
        shape["draft_vocab_size"],
        ttt_steps=shape["num_steps"],
        step_decay=shape["step_decay"],
        device=device,
        dtype=getattr(torch, spec["dtype"]),
    )
    peer.load(weights)

    def step(index: int) -> Tensor:
        loss = peer.loss(rows[index])
        loss.backward()
        return loss.detach()

    return peer.model, step, peer.about
