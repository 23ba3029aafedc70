"""The step of speculators, for `worker.py`."""

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
    from train.bench.peers.speculators_step import SpeculatorsStep

    shape = spec["shape"]
    peer = SpeculatorsStep(
        spec["llama_config"],
        shape["draft_vocab_size"],
        ttt_steps=shape["num_steps"],
        step_decay=shape["step_decay"],
        loss="kl_div",
        device=device,
        dtype=getattr(torch, spec["dtype"]),
        config={"eagle_aux_hidden_state_layer_ids": list(range(3))},
    )
    peer.load(weights)
    inputs = [peer.inputs(row) for row in rows]

    def step(index: int) -> Tensor:
        loss = peer.loss(inputs[index])
        loss.backward()
        return loss.detach()

    return peer.model, step, peer.about
