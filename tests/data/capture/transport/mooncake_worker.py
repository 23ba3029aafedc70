"""A process that puts samples into a Mooncake store."""

import json
import sys
from typing import Any

import torch
from torch import Tensor

from data.capture.transport.mooncake import MooncakeTransport
from data.capture.transport.mooncake_store import MooncakeSettings
from data.capture.transport.protocol import StateRequest

NUM_AUX_LAYERS, HIDDEN_SIZE = 3, 64


def sample(index: int, num_tokens: int) -> tuple[StateRequest, Tensor, Tensor]:
    """Return a sample that is the same in every process."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1000, (num_tokens,), generator=generator)
    aux = torch.randn(num_tokens, NUM_AUX_LAYERS, HIDDEN_SIZE, generator=generator).bfloat16()
    last = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).bfloat16()
    return StateRequest(f"run-{index}", ids, torch.ones(num_tokens, dtype=torch.bool)), aux, last


def open_transport(settings: MooncakeSettings, put_seconds: float = 60.0) -> MooncakeTransport:
    return MooncakeTransport(
        settings, num_aux_layers=NUM_AUX_LAYERS, hidden_size=HIDDEN_SIZE, put_seconds=put_seconds
    )


def main(settings: dict[str, Any], num_samples: int, num_tokens: int) -> None:
    transport = open_transport(MooncakeSettings(**settings))
    for index in range(num_samples):
        transport.put(*sample(index, num_tokens))
    transport.close()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
