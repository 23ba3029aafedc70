"""What training reads: the captured stores, or states that are captured while it runs."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager

from datasets import Dataset

from data.capture.arriving import ArrivingStates
from data.capture.hf import HiddenStateCapture, check_head
from data.capture.hf_source import TransformersStates
from data.capture.tokens import dataset_lengths
from data.capture.vllm.client import VllmClient, check_states
from data.capture.vllm.producer import VllmProducer
from data.capture.vllm.server_info import ServerInfo
from data.conversations.saved import load_saved
from data.refusals import MAX_REFUSED_FRACTION, refusal_lines
from data.samples import HiddenStateSource
from data.store import HiddenStateStore
from data.store.codec import Encoding
from data.target.loading import load_target
from data.target.modules import locate
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import Stage
from train.context import RunContext
from train.engines.transport import OpenTransport, chosen_transport, open_transport, rank_name

_READ_THREADS = 4  # of a rank, which read and decode the samples of a store
BATCH_TOKENS = 8192  # of one forward pass in transformers, with padding: enough to keep a GPU busy


def training_samples(context: RunContext) -> Dataset:
    """Return the samples that the data stage has chosen."""
    return load_saved(context.artifacts[Stage.data].directory / "train")


@contextmanager
def opened_source(context: RunContext) -> Iterator[HiddenStateSource]:
    """Open what training reads: the verified store, or states that are captured while it runs."""
    if context.config.capture.mode is CaptureMode.offline:
        yield open_source(context)
    elif context.config.capture.source is CaptureSource.hf:
        yield TransformersStates(
            training_samples(context), open_capture(context), training_encoding(context), BATCH_TOKENS
        )
    else:
        samples = training_samples(context)
        with vllm_states(context, samples, training_encoding(context), MAX_REFUSED_FRACTION) as source:
            yield source
            for line in refusal_lines(source.refused, len(source)):
                print(f"capture: {line}", file=sys.stderr)


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
        num_threads=_READ_THREADS,
        given=given is not None,
    )
    store.verify(world.rank, world.size)
    return store


def open_capture(context: RunContext) -> HiddenStateCapture:
    """Load the target with its capture hooks, and check that its head gives its logits."""
    target = context.target
    model = load_target(target.spec, context.world.device)
    capture = HiddenStateCapture(model, locate(model, target.spec), context.drafter.aux_layer_ids)
    check_head(capture, target.parts.head)
    return capture


def opened_transport(context: RunContext, encoding: Encoding) -> AbstractContextManager[OpenTransport]:
    """Open the run's transport between this rank and vLLM's servers. A rank has one at a time.

    Args:
        encoding: the form of the states on the way.
    """
    capture = context.config.capture
    chosen = chosen_transport(capture, context.config.vllm, context.output_dir)
    name = rank_name(context.output_dir, context.world.rank)
    return open_transport(chosen, capture, encoding, context.captured_target, name)


def training_encoding(context: RunContext) -> Encoding:
    """Return the form in which training reads the states."""
    return Encoding(context.config.capture.codec)


@contextmanager
def vllm_states(
    context: RunContext, dataset: Dataset, encoding: Encoding, max_refused_fraction: float | None = None
) -> Iterator[ArrivingStates]:
    """Open a dataset's states as this run's vLLM servers deliver them to this rank.

    Args:
        max_refused_fraction: the largest part of the dataset that may be refused; None: any.
    """
    config, world = context.config, context.world
    expected, longest = context.captured_target.expected_states(), max(dataset_lengths(dataset))

    def check(client: VllmClient, info: ServerInfo) -> None:
        check_states(client, info, expected, longest)

    # Servers that the run has started write into the memory of their own node.
    clients = context.servers.clients(everywhere=False)
    with opened_transport(context, encoding) as opened:
        patience_seconds = context.servers.patience_seconds
        with closing(VllmProducer(clients, opened.transport, check, patience_seconds)) as producer:
            source = ArrivingStates(
                dataset,
                producer,
                opened.transport,
                shape=opened.shape,
                sample_bytes=opened.sample_bytes,
                spool_gb=config.capture.spool_gb,
                num_sharing=world.ranks_per_node,
                name=rank_name(context.output_dir, world.rank),
                max_refused_fraction=max_refused_fraction,
            )
            yield source
