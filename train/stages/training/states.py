"""What training reads: the captured stores, or states that are captured while it runs."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import torch
from datasets import Dataset

from data.capture.hf_producer import hf_producer
from data.capture.online import OnlineStates
from data.capture.refusals import refusal_lines
from data.conversations.saved import load_saved
from data.samples import HiddenStateSource
from data.store import HiddenStateStore
from data.store.codec import Encoding
from data.transport.mooncake import MooncakeTransport
from data.transport.protocol import Arrivals, Producer, Transport
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import Stage
from train.context import RunContext
from train.inference.online import (
    StateFormat,
    online_states,
    open_transport,
    rank_name,
)
from train.inference.transport import chosen_transport
from train.inference.vllm import vllm_producer

_FINISH_SECONDS = 30.0  # for states that are on their way when training ends


def training_samples(context: RunContext) -> Dataset:
    """Return the samples that the data stage has chosen."""
    return load_saved(context.artifacts[Stage.data].directory / "train")


@contextmanager
def opened_source(context: RunContext) -> Iterator[HiddenStateSource]:
    """Open what training reads: the verified store, or states that are captured while it runs."""
    if context.config.capture.mode is CaptureMode.offline:
        yield open_source(context)
    else:
        with online_source(context, training_samples(context)) as source:
            yield source


def open_source(context: RunContext) -> HiddenStateStore:
    """Return the store that training reads, of which this rank has verified its part."""
    return open_store(context, "train")


def open_store(context: RunContext, name: str) -> HiddenStateStore:
    """Return one of the captured stores, or the given one; every rank verifies a part of it.

    Raises:
        DamagedShard: a shard of this rank's part was altered.
    """
    world, capture = context.world, context.config.capture
    given = capture.store if name == "train" else None
    store = HiddenStateStore(
        given or context.artifacts[Stage.capture].directory / name,
        num_threads=capture.read_threads,
        given=given is not None,
    )
    store.verify(world.rank, world.size)
    return store


@contextmanager
def online_source(context: RunContext, dataset: Dataset) -> Iterator[OnlineStates]:
    """Run the target alongside training, with the recipe's producer and transport."""
    capture = context.config.capture
    opened = vllm_states if capture.source is CaptureSource.vllm else hf_states
    with opened(context, dataset, training_encoding(context)) as source, reported(source):
        yield source


@contextmanager
def reported(source: OnlineStates) -> Iterator[OnlineStates]:
    """Report at the end which samples were refused on this rank, and why."""
    try:
        yield source
    finally:
        for line in refusal_lines(source.refused, len(source)):
            print(f"capture: {line}", file=sys.stderr)


def opened_transport(
    context: RunContext, encoding: Encoding
) -> AbstractContextManager[tuple[Transport, StateFormat]]:
    """Open the run's transport between this rank and its producers. A rank has one at a time.

    Args:
        encoding: the form of the states on the way.
    """
    capture = context.config.capture
    chosen = chosen_transport(capture, context.config.vllm, context.output_dir)
    name = rank_name(context.output_dir, context.world.rank)
    return open_transport(chosen, capture, encoding, context.captured_target, name)


def training_encoding(context: RunContext) -> Encoding:
    """Return the form in which training reads the states."""
    return Encoding(context.config.capture.codec, context.config.capture.final_states)


@contextmanager
def vllm_states(context: RunContext, dataset: Dataset, encoding: Encoding) -> Iterator[OnlineStates]:
    """Open a dataset's states as this run's vLLM servers deliver them."""
    # Servers that the run has started write into the memory of their own node.
    endpoints = context.servers.endpoints(everywhere=False)
    with opened_transport(context, encoding) as (transport, state_format):
        producer = vllm_producer(
            endpoints,
            transport,
            context.captured_target,
            context.config.data.max_tokens,
            context.servers.patience_seconds,
        )
        with closing(producer):
            yield source_of(context, dataset, producer, transport, state_format)
            if isinstance(transport, MooncakeTransport):
                # Such a store would keep what comes after this, in pinned memory.
                producer.finish(_FINISH_SECONDS)


@contextmanager
def hf_states(context: RunContext, dataset: Dataset, encoding: Encoding) -> Iterator[OnlineStates]:
    """Open a dataset's states as processes of this rank deliver them, which run the target."""
    capture, target = context.config.capture, context.captured_target
    with opened_transport(context, encoding) as (transport, state_format):
        # The processes load the target on the devices where the capture stage had it.
        torch.cuda.empty_cache()
        producer = hf_producer(
            target.spec,
            target.aux_layer_ids,
            context.world.device,
            transport,
            capture.batch_tokens,
            capture.processes,
            stall_seconds=60 * capture.stall_minutes,
            start_seconds=context.start_seconds,
        )
        with closing(producer):
            yield source_of(context, dataset, producer, transport, state_format)


def source_of(
    context: RunContext,
    dataset: Dataset,
    producer: Producer,
    arrivals: Arrivals,
    state_format: StateFormat,
) -> OnlineStates:
    """Return the samples of one dataset as the producer delivers them to this rank."""
    return online_states(
        dataset,
        producer,
        arrivals,
        state_format,
        context.captured_target,
        spool_gb=context.config.capture.spool_gb,
        name=rank_name(context.output_dir, context.world.rank),
        max_refused_fraction=context.config.capture.max_refused_fraction,
    )
