"""Online training's hidden states: who makes them, and how they come."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from data.capture.drain import drain_to_store
from data.capture.hf_producer import hf_producer
from data.capture.offline import StoreSpec
from data.capture.online import OnlineStates, StateShape
from data.capture.processes import ProcessProducer
from data.store.codec import Encoding
from data.torchspec.settings import DTYPE as TORCHSPEC_DTYPE
from data.torchspec.settings import TorchSpecSettings
from data.torchspec.states import TorchSpecStates
from data.transport.mooncake import MooncakeSettings, MooncakeTransport, state_bytes
from data.transport.protocol import Arrivals, Producer, Transport
from data.transport.spool import file_bytes, open_spool
from data.vllm.client import check_server
from data.vllm.dispatch import PATIENCE_SECONDS
from data.vllm.producer import VllmProducer
from train.config.capture import CaptureSource, TransportKind
from train.context import RunContext
from train.inference.vllm import capture_endpoints, expected_states


@contextmanager
def online_source(context: RunContext, dataset: Dataset) -> Iterator[OnlineStates]:
    """What training reads while it runs."""
    if context.config.capture.source is CaptureSource.torchspec:
        with torchspec_states(context) as states:
            yield torchspec_source(context, states, dataset)
        return
    with open_transport(context) as (transport, dtype, sample_bytes):
        # The producers load the target on the devices where the capture stage had it.
        torch.cuda.empty_cache()
        with closing(open_producer(context, transport)) as producer:
            yield source_of(context, dataset, producer, transport, dtype, sample_bytes)


def source_of(
    context: RunContext,
    dataset: Dataset,
    producer: Producer,
    transport: Arrivals,
    dtype: torch.dtype,
    sample_bytes: Callable[[Tensor], int],
) -> OnlineStates:
    return OnlineStates(
        dataset,
        producer,
        transport,
        shape=StateShape(len(context.aux_layer_ids), context.parts.hidden_size, dtype),
        sample_bytes=sample_bytes,
        spool_gb=context.config.capture.spool_gb,
        num_sharing=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        name=rank_name(context),
    )


@contextmanager
def open_transport(
    context: RunContext,
) -> Iterator[tuple[Transport, torch.dtype, Callable[[Tensor], int]]]:
    """The way from this rank's producers, the dtype in which states arrive, what each takes of the bound."""
    capture, parts = context.config.capture, context.parts
    num_aux_layers, target_dtype = len(context.aux_layer_ids), parts.embed_tokens.dtype
    encoding = Encoding(capture.codec, capture.final_states)
    dtype = target_dtype if capture.codec == "exact" else torch.bfloat16
    if capture.transport is TransportKind.mooncake:
        transport = MooncakeTransport(
            mooncake_settings(context),
            num_aux_layers=num_aux_layers,
            hidden_size=parts.hidden_size,
            dtype=dtype,
        )
        with closing(transport), emptied(transport, f"{rank_name(context)}-"):
            yield (
                transport,
                dtype,
                lambda mask: state_bytes(len(mask), num_aux_layers, parts.hidden_size, dtype),
            )
        return
    base = None if capture.spool_dir is None else Path(capture.spool_dir)
    with open_spool(base, rank_name(context), encoding, int(capture.spool_gb * 1e9)) as spool:
        yield (
            spool,
            dtype,
            lambda mask: file_bytes(encoding, mask, num_aux_layers, parts.hidden_size, target_dtype),
        )


@contextmanager
def emptied(transport: MooncakeTransport, prefix: str) -> Iterator[None]:
    """Leaves nothing under the prefix, neither of this run nor of a dead one before it.

    What was asked for ahead of the last step is taken by nobody, and may lie in the memory of others, pinned.
    """
    transport.discard_all(prefix)
    try:
        yield
    finally:
        transport.discard_all(prefix)


def open_producer(context: RunContext, transport: Transport) -> VllmProducer | ProcessProducer:
    """Who runs the target; puts what it is asked for into the transport."""
    capture = context.config.capture
    if capture.source is CaptureSource.vllm:
        wanted, longest = expected_states(context), context.config.data.max_tokens
        spool = transport.to_json().get("spool")
        directory = None if spool is None else Path(spool)
        return VllmProducer(
            capture_endpoints(context),
            transport,
            check=lambda endpoint, facts: check_server(endpoint, facts, wanted, directory, longest),
            patience_seconds=PATIENCE_SECONDS,
        )
    return hf_producer(
        context.spec,
        context.aux_layer_ids,
        context.world.device,
        transport,
        capture.batch_tokens,
        capture.processes,
    )


@contextmanager
def torchspec_states(context: RunContext) -> Iterator[TorchSpecStates]:
    """TorchSpec's engines, started by rank 0 and found by the others."""
    config, parts = context.config, context.parts
    torchspec = config.capture.torchspec
    assert torchspec.python is not None
    settings = TorchSpecSettings(
        python=torchspec.python,
        target=context.spec.checkpoint.path,
        aux_layer_ids=context.aux_layer_ids,
        num_layers=parts.num_layers,
        hidden_size=parts.hidden_size,
        # A held-out conversation is a prompt and what the target answered to it.
        max_tokens=config.data.max_tokens + config.evaluate.max_new_tokens,
        mooncake=mooncake_settings(context),
        rope_parameters=getattr(parts.config.get_text_config(), "rope_parameters", None) or {},
        overrides=tuple(torchspec.overrides),
        trust_remote_code=context.spec.trust_remote_code,
    )
    log = context.output_dir / f"torchspec-{context.world.rank}.log"
    states = TorchSpecStates(
        settings, parts.head.norm, run=run_name(context), rank=context.world.rank, log=log
    )
    with closing(states):
        yield states


def torchspec_source(context: RunContext, states: TorchSpecStates, dataset: Dataset) -> OnlineStates:
    """The samples of one dataset."""
    num_aux_layers, hidden_size = len(context.aux_layer_ids), context.parts.hidden_size

    def sample_bytes(loss_mask: Tensor) -> int:
        return state_bytes(len(loss_mask), num_aux_layers, hidden_size, TORCHSPEC_DTYPE)

    return source_of(context, dataset, states, states, TORCHSPEC_DTYPE, sample_bytes)


def capture_by_torchspec(
    context: RunContext, stores: Sequence[StoreSpec], manifest_fields: Mapping[str, Any]
) -> None:
    """Rank 0 has TorchSpec's engines capture and writes what comes; the others wait for the end."""
    capture, world = context.config.capture, context.world
    with torchspec_states(context) if world.is_main else nullcontext() as states:
        for store in stores:
            drain_to_store(
                store,
                None if states is None else torchspec_source(context, states, store.dataset),
                replace(expected_states(context), dtype=TORCHSPEC_DTYPE),
                shard_tokens=capture.shard_tokens,
                manifest_fields={**manifest_fields, "dtype": str(TORCHSPEC_DTYPE).removeprefix("torch.")},
                progress=world.is_main,
            )


def mooncake_settings(context: RunContext) -> MooncakeSettings:
    mooncake = context.config.capture.mooncake
    return MooncakeSettings(
        master=mooncake.master,
        metadata=mooncake.metadata,
        protocol=mooncake.protocol,
        device=mooncake.device,
        segment_bytes=int(mooncake.segment_gb * 1e9),
    )


def rank_name(context: RunContext) -> str:
    """Of this trainer process; the same when the run is started again."""
    return f"{run_name(context)}-{context.world.rank}"


def run_name(context: RunContext) -> str:
    """The same when the run is started again, and another for another run on this machine."""
    return hashlib.sha256(str(context.output_dir.resolve()).encode()).hexdigest()[:12]
