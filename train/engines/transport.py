"""The path of states from vLLM's servers to the ranks, as it follows from where the servers run."""

import hashlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data.capture.transport.mooncake import MooncakeTransport, state_bytes
from data.capture.transport.mooncake_store import MooncakeSettings
from data.capture.transport.protocol import Transport
from data.capture.transport.spool import file_bytes, open_spool
from data.samples import StateShape
from train.config.capture import CaptureConfig
from train.config.run import RunConfig, states_directory
from train.engines.servers import CapturedTarget

# Room of a Mooncake store relative to the states that may wait in it: the next state must always fit.
_ROOM = 1.1
_LEAST_BYTES = 32_000_000  # Mooncake takes no segment below 16 MiB


@dataclass(frozen=True)
class OpenTransport:
    """A rank's transport, and the form in which it delivers the target's states."""

    transport: Transport
    shape: StateShape
    codec: str
    target_dtype: torch.dtype

    def sample_bytes(self, loss_mask: Tensor) -> int:
        """Return the most bytes that a sample takes on the way. loss_mask bool [T]."""
        shape = self.shape
        if isinstance(self.transport, MooncakeTransport):
            return state_bytes(len(loss_mask), shape.num_aux_layers, shape.hidden_size, shape.dtype)
        layers, size = shape.num_aux_layers, shape.hidden_size
        return file_bytes(self.codec, loss_mask, layers, size, self.target_dtype)


@contextmanager
def open_transport(
    config: RunConfig, target: CapturedTarget, rank: int, codec: str
) -> Iterator[OpenTransport]:
    """Open the transport between a rank and the servers; nothing is left in it at the end.

    A rank has one at a time.

    Args:
        codec: the form of the states on the way.
    """
    output_dir, spool_dir = Path(config.output_dir), states_directory(config)
    name, target_dtype = rank_name(output_dir, rank), target.parts.dtype
    dtype = target_dtype if codec == "exact" else torch.bfloat16
    shape = StateShape(target.num_aux_layers, target.parts.hidden_size, dtype)
    if spool_dir is None:
        transport = MooncakeTransport(
            mooncake_settings(config.capture),
            num_aux_layers=shape.num_aux_layers,
            hidden_size=shape.hidden_size,
            dtype=dtype,
        )
        with closing(transport):
            # What a killed run left, and what nobody reads: it may occupy pinned memory of other processes.
            transport.discard_all(f"{name}-")
            try:
                yield OpenTransport(transport, shape, codec, target_dtype)
            finally:
                transport.discard_all(f"{name}-")
        return
    if spool_dir.is_relative_to(output_dir.absolute()):
        spool_dir.mkdir(parents=True, exist_ok=True)
    with open_spool(spool_dir, name, codec, int(config.capture.spool_gb * 1e9)) as spool:
        yield OpenTransport(spool, shape, codec, target_dtype)


def mooncake_settings(capture: CaptureConfig, num_sharing: int = 1) -> MooncakeSettings:
    """Return the recipe's Mooncake store in the transport's units; `num_sharing` ranks lend its memory."""
    mooncake = capture.mooncake
    return MooncakeSettings(
        master=mooncake.master,
        protocol=mooncake.protocol,
        device=mooncake.device or "",
        segment_bytes=max(int(_ROOM * capture.spool_gb / num_sharing * 1e9), _LEAST_BYTES),
    )


def rank_name(output_dir: Path, rank: int) -> str:
    """Return the name of one trainer process, which a restarted run keeps and no other run here has."""
    return f"{hashlib.sha256(str(output_dir.resolve()).encode()).hexdigest()[:12]}-{rank}"
