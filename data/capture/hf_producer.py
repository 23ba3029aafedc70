"""The target through transformers, in processes of its own beside a trainer."""

from collections.abc import Sequence
from dataclasses import asdict

import torch

from data.capture.processes import ProcessProducer
from data.target.spec import TargetSpec
from data.transport.protocol import Transport

_WORKER = "data.capture.hf_worker"


def hf_producer(
    spec: TargetSpec,
    aux_layer_ids: Sequence[int],
    device: torch.device,
    transport: Transport,
    batch_tokens: int,
    num_processes: int,
) -> ProcessProducer:
    """The target through transformers, on `device` unless `spec.device_map` spreads it.

    Args:
        batch_tokens: the most tokens, padding included, in one forward pass.
        num_processes: each holds the target.
    """
    settings = {
        "target": asdict(spec),
        "aux_layer_ids": list(aux_layer_ids),
        "device": str(device),
        "batch_tokens": batch_tokens,
        "transport": transport.to_json(),
    }
    return ProcessProducer(_WORKER, settings, transport, num_processes)
