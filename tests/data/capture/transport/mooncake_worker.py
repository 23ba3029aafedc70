"""A process that puts samples into a Mooncake store, or takes them."""

import json
import sys
import time

import torch
from torch import Tensor

from data.capture.transport.mooncake import MooncakeTransport
from data.capture.transport.mooncake_store import MooncakeSettings
from data.capture.transport.protocol import StateRequest

NUM_AUX_LAYERS, HIDDEN_SIZE = 3, 64
_TAKE_SECONDS = 1000.0


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


def main(order: dict) -> None:
    transport = open_transport(MooncakeSettings(**order["settings"]))
    for index in order["indices"]:
        request, aux, last = sample(index, order["num_tokens"])
        if order["role"] == "put":
            transport.put(request, aux, last)
        else:
            taken = transport.take(request, _TAKE_SECONDS)
            assert taken is not None, f"{request.key} never came"
            assert taken.aux_hidden_states.equal(aux)
            assert taken.final_hidden_states.equal(last)
        print(index, flush=True)
    if order["role"] == "put" and order["settings"]["segment_bytes"]:
        time.sleep(600)  # what it stored is in its own memory
    transport.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
