"""Online training's hidden states: the transport that carries them, and the source that training reads."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from data.capture.online import OnlineStates
from data.samples import StateShape
from data.store.codec import Encoding
from data.transport.mooncake import MooncakeTransport, state_bytes
from data.transport.mooncake_store import MooncakeSettings
from data.transport.protocol import Arrivals, Producer, Transport
from data.transport.spool import file_bytes, open_spool
from train.config.capture import CaptureConfig, MooncakeConfig
from train.inference.target import CapturedTarget
from train.inference.transport import ChosenTransport


@dataclass(frozen=True)
class StateFormat:
    """The form in which a transport delivers hidden states."""

    dtype: torch.dtype
    sample_bytes: Callable[[Tensor], int]  # from a loss mask [T], the bytes that the sample takes on the way


@contextmanager
def open_transport(
    chosen: ChosenTransport, capture: CaptureConfig, encoding: Encoding, target: CapturedTarget, name: str
) -> Iterator[tuple[Transport, StateFormat]]:
    """Open the transport between this rank and its producers; nothing is left in it at the end.

    Args:
        encoding: the form of the states on the way.
        name: this trainer process, from `rank_name`.
    """
    hidden_size, target_dtype = target.parts.hidden_size, target.parts.embed_tokens.dtype
    num_aux_layers = target.num_aux_layers
    dtype = target_dtype if encoding.codec == "exact" else torch.bfloat16
    if chosen.mooncake:
        transport = MooncakeTransport(
            mooncake_settings(capture.mooncake),
            num_aux_layers=num_aux_layers,
            hidden_size=hidden_size,
            dtype=dtype,
        )
        with closing(transport), emptied(transport, f"{name}-"):
            yield transport, StateFormat(dtype, _mooncake_bytes(target, dtype))
        return
    if chosen.made:
        chosen.spool_dir.mkdir(parents=True, exist_ok=True)
    with open_spool(chosen.spool_dir, name, encoding, int(capture.spool_gb * 1e9)) as spool:
        yield (
            spool,
            StateFormat(
                dtype, lambda mask: file_bytes(encoding, mask, num_aux_layers, hidden_size, target_dtype)
            ),
        )


def _mooncake_bytes(target: CapturedTarget, dtype: torch.dtype) -> Callable[[Tensor], int]:
    return lambda mask: state_bytes(len(mask), target.num_aux_layers, target.parts.hidden_size, dtype)


@contextmanager
def emptied(transport: MooncakeTransport, prefix: str) -> Iterator[None]:
    """Remove everything under the prefix, at the start what a killed run left and at the end what is unread.

    Nobody takes the samples that were requested ahead of the last step, and they may occupy pinned memory of
    other processes.
    """
    transport.discard_all(prefix)
    try:
        yield
    finally:
        transport.discard_all(prefix)


def online_states(
    dataset: Dataset,
    producer: Producer,
    arrivals: Arrivals,
    state_format: StateFormat,
    target: CapturedTarget,
    *,
    spool_gb: float,
    name: str,
    max_refused_fraction: float,
) -> OnlineStates:
    """Return the source that training reads while the producer runs the target.

    Args:
        spool_gb: the most that may wait between producers and trainers, over all ranks of a node.
        name: this trainer process, from `rank_name`.
        max_refused_fraction: the largest part of the dataset that may be refused.
    """
    return OnlineStates(
        dataset,
        producer,
        arrivals,
        shape=StateShape(target.num_aux_layers, target.parts.hidden_size, state_format.dtype),
        sample_bytes=state_format.sample_bytes,
        spool_gb=spool_gb,
        num_sharing=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        name=name,
        max_refused_fraction=max_refused_fraction,
    )


def mooncake_settings(mooncake: MooncakeConfig) -> MooncakeSettings:
    """Return the recipe's Mooncake store in the transport's units."""
    return MooncakeSettings(
        master=mooncake.master,
        metadata=mooncake.metadata,
        protocol=mooncake.protocol,
        device=mooncake.device,
        segment_bytes=int(mooncake.segment_gb * 1e9),
    )


def run_name(output_dir: Path) -> str:
    """Return a name that a restarted run keeps and that no other run on this machine has."""
    return hashlib.sha256(str(output_dir.resolve()).encode()).hexdigest()[:12]


def rank_name(output_dir: Path, rank: int) -> str:
    """Return the name of one trainer process, which a restarted run keeps."""
    return f"{run_name(output_dir)}-{rank}"
