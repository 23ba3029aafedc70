"""The producer that runs the target through transformers in separate processes."""

from collections.abc import Sequence
from dataclasses import asdict

import torch

from data.capture.processes import ProcessProducer
from data.progress import STALL_SECONDS
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
    *,
    stall_seconds: float = STALL_SECONDS,
    start_seconds: float | None = None,
) -> ProcessProducer:
    """Start processes that run the target on `device`, unless `spec.device_map` spreads it.

    Args:
        batch_tokens: the most tokens in one forward pass, with padding.
        num_processes: the number of processes, each of which holds the target.
        stall_seconds: the longest time that one may work without progress.
        start_seconds: the longest time that one may take to load the target.
    """
    settings = {
        "target": asdict(spec),
        "aux_layer_ids": list(aux_layer_ids),
        "device": str(device),
        "batch_tokens": batch_tokens,
        "transport": transport.to_json(),
    }
    return ProcessProducer(
        _WORKER,
        settings,
        transport,
        num_processes,
        stall_seconds=stall_seconds,
        start_seconds=start_seconds,
    )
