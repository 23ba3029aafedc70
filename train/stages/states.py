"""What training reads: the captured stores, or states that are captured while it runs."""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from datasets import Dataset

from data.capture.arriving import ArrivingStates
from data.capture.dispatch import Dispatcher
from data.capture.hf import open_capture
from data.capture.hf_source import TransformersStates
from data.capture.tokens import dataset_lengths
from data.capture.transport.protocol import OpenTransport
from data.capture.vllm.client import check_states
from data.refusals import refusal_lines
from data.samples import HiddenStateSource
from data.store import HiddenStateStore
from train.artifact import Artifact
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import Stage
from train.context import RunContext
from train.distributed import World
from train.engines.transport import open_run_spool, rank_name, spool_transport

_READ_THREADS = 4  # of a rank, which read and decode the samples of a store
BATCH_TOKENS = 8192  # of one forward pass in transformers, with padding: enough to keep a GPU busy


def training_samples(data: Artifact) -> Dataset:
    """Return the samples that the data stage has chosen."""
    return data.dataset("train")


@contextmanager
def opened_source(context: RunContext) -> Iterator[HiddenStateSource]:
    """Open what training reads: the verified store, or states that are captured while it runs."""
    capture, world = context.config.capture, context.world
    if capture.mode is CaptureMode.offline:
        captured = context.artifacts[Stage.capture].directory / "train"
        yield open_store(capture.store or captured, world, given=capture.store is not None)
        return
    samples, codec = training_samples(context.artifacts[Stage.data]), capture.codec
    if capture.source is CaptureSource.hf:
        target = open_capture(
            context.target.spec, context.target.parts, context.drafter.aux_layer_ids, world.device
        )
        yield TransformersStates(samples, target, codec, BATCH_TOKENS)
        return
    with arriving_states(context, samples, codec, checks_refused=True) as source:
        yield source
        for line in refusal_lines(source.refused, len(source)):
            print(f"capture: {line}", file=sys.stderr)


def open_store(location: str | Path, world: World, *, given: bool = False) -> HiddenStateStore:
    """Open a store, of which every rank verifies a part.

    Args:
        given: whether the recipe names it.

    Raises:
        DamagedShard: a shard of this rank's part was altered.
    """
    store = HiddenStateStore(location, num_threads=_READ_THREADS, given=given)
    store.verify(world.rank, world.size)
    return store


@contextmanager
def arriving_states(
    context: RunContext, dataset: Dataset, codec: str, *, checks_refused: bool
) -> Iterator[ArrivingStates]:
    """Open a dataset's states as this run's vLLM servers, or TorchSpec's engines, deliver them to this rank.

    Args:
        checks_refused: whether too many refused samples are an error; a store checks its own.
    """
    config, world = context.config, context.world
    if config.capture.source is CaptureSource.torchspec:
        connected = context.torchspec.connected()
    else:
        connected = _vllm_connected(context, dataset, codec)
    with connected as (dispatcher, opened):
        yield ArrivingStates(
            dataset,
            dispatcher,
            opened,
            spool_gb=config.capture.spool_gb,
            num_sharing=world.ranks_per_node,
            name=rank_name(context.output_dir, world.rank),
            checks_refused=checks_refused,
            stopping=lambda: context.stop_reason() is not None,
        )


@contextmanager
def _vllm_connected(
    context: RunContext, dataset: Dataset, codec: str
) -> Iterator[tuple[Dispatcher, OpenTransport]]:
    config, world = context.config, context.world
    target = context.captured_target
    check = partial(check_states, target, max(dataset_lengths(dataset)))
    # Servers that the run has started write into the memory of their own node.
    clients = context.servers.clients(everywhere=False)
    with (
        open_run_spool(config, world.rank, codec) as spool,
        closing(Dispatcher(clients, check, context.servers.patience_seconds)) as dispatcher,
    ):
        yield dispatcher, spool_transport(spool, target)
