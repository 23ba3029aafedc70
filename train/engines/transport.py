"""The path of states from the target's engines to a rank."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from data.capture.transport.protocol import OpenTransport
from data.capture.transport.spool import Spool, file_bytes, open_spool
from data.capture.vllm.capture_request import capture_params
from data.samples import StateShape
from data.target.parts import CapturedTarget
from train.config.run import RunConfig, states_directory


def spool_transport(spool: Spool, target: CapturedTarget) -> OpenTransport:
    """Return a spool as the transport of the target's states from vLLM's servers."""
    dtype = target.parts.dtype if spool.codec == "exact" else torch.bfloat16
    shape = StateShape(target.num_aux_layers, target.parts.hidden_size, dtype)
    return OpenTransport(
        spool,
        shape,
        lambda loss_mask: file_bytes(spool.codec, loss_mask, shape),
        partial(capture_params, spool),
    )


@contextmanager
def open_run_spool(config: RunConfig, rank: int, codec: str) -> Iterator[Spool]:
    """Open the spool between a rank and vLLM's servers; nothing is left in it at the end.

    A rank has one at a time.

    Args:
        codec: the form of the states on the way.
    """
    output_dir, spool_dir = Path(config.output_dir), states_directory(config)
    assert spool_dir is not None, "the run has no servers"
    if spool_dir.is_relative_to(output_dir.absolute()):
        spool_dir.mkdir(parents=True, exist_ok=True)
    name = rank_name(output_dir, rank)
    with open_spool(spool_dir, name, codec, int(config.capture.spool_gb * 1e9)) as spool:
        yield spool


def rank_name(output_dir: Path, rank: int) -> str:
    """Return the name of one trainer process, which a restarted run keeps and no other run here has."""
    return f"{hashlib.sha256(str(output_dir.resolve()).encode()).hexdigest()[:12]}-{rank}"
