"""The capture stage: the target's hidden states, in a store or online. Every rank runs it."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from data.capture.drain import drain_to_store
from data.capture.given_store import check_samples, check_states
from data.capture.hf_producer import hf_producer
from data.capture.offline import capture_to_store
from data.capture.online import OnlineStates
from data.capture.opening import StoreSpec
from data.capture.refusals import refusal_lines
from data.rendering.template import template_fingerprint
from data.samples import HiddenStateSource
from data.store import HiddenStateStore
from data.store.codec import Encoding
from data.store.index import STATES_VERSION
from data.store.sample_cache import CacheSettings
from data.target.tokenizer import tokenizer_fingerprint
from data.text.saved import load_saved
from data.torchspec.settings import DTYPE as TORCHSPEC_DTYPE
from data.torchspec.states import TorchSpecStates
from data.transport.protocol import Arrivals, Producer, Transport
from data.vllm.arguments import CaptureEngine
from data.vllm.client import capture_through_vllm
from train.config.capture import CaptureMode, CaptureSource, TransportKind
from train.config.evaluate import longest_cell_sample
from train.config.run import RunConfig, Stage
from train.context import RunContext
from train.distributed import World
from train.inference.inputs import target_inputs, transformers_inputs, vllm_inputs
from train.inference.online import (
    StateFormat,
    online_states,
    open_transport,
    rank_name,
    run_name,
    torchspec_format,
)
from train.inference.torchspec import torchspec_settings
from train.inference.transport import chosen_transport
from train.inference.vllm import vllm_producer
from train.stages.data import HELD_OUT


def capture_inputs(context: RunContext) -> dict[str, Any]:
    capture = context.config.capture
    inputs: dict[str, Any] = {
        "data": context.artifacts[Stage.data].key,
        "answers": context.artifacts[Stage.answers].key,
        "aux_layer_ids": context.aux_layer_ids,
        "source": capture.source.value,
        "mode": capture.mode.value,
    }
    inputs |= target_inputs(context.config.target, context.parts.fingerprint)
    inputs |= SOURCE_INPUTS[capture.source](context.config)
    inputs |= {"codec": capture.codec, "final_states": capture.final_states, "format": STATES_VERSION}
    if capture.mode is CaptureMode.offline:
        inputs |= {"max_samples": capture.max_samples, "seed": context.config.seed}
    if capture.store is not None:
        encoding = training_encoding(context).to_json()
        inputs["store"] = check_states(capture.store, manifest_fields(context) | {"encoding": encoding})
    return inputs


SOURCE_INPUTS: dict[CaptureSource, Callable[[RunConfig], dict[str, Any]]] = {
    CaptureSource.hf: lambda config: transformers_inputs(config.target),
    CaptureSource.vllm: lambda config: vllm_inputs(config.vllm.engine_args),
    CaptureSource.torchspec: lambda config: {"torchspec": config.capture.torchspec.overrides},
}


def training_samples(context: RunContext) -> Dataset:
    """Return the tokenized data, or `capture.max_samples` random samples of it."""
    dataset = load_saved(context.artifacts[Stage.data].directory / "train")
    limit = context.config.capture.max_samples
    if limit is None or limit >= len(dataset):
        return dataset
    return dataset.shuffle(seed=context.config.seed).select(range(limit)).flatten_indices()


def run_capture(context: RunContext, directory: Path) -> dict[str, Any]:
    """Write stores of hidden states: `validation/`, `test/`, and `train/` if training reads that."""
    answers = context.artifacts[Stage.answers].directory
    datasets = {name: load_saved(answers / name) for name in HELD_OUT}
    capture = context.config.capture
    if capture.store is not None:
        check_samples(capture.store, training_samples(context))
    elif capture.mode is CaptureMode.offline:
        datasets["train"] = training_samples(context)
    # Replay equals serving only if it reads the exact states.
    encodings = dict.fromkeys(HELD_OUT, Encoding()) | {"train": training_encoding(context)}
    specs = [
        StoreSpec(directory / name, dataset, encodings[name], capture.max_refused_fraction)
        for name, dataset in datasets.items()
    ]
    SOURCES[capture.source](context, specs, manifest_fields(context))
    stores = {name: HiddenStateStore(directory / name) for name in datasets}
    if capture.store is not None:
        stores["train"] = HiddenStateStore(capture.store, given=True)
    return {
        "num_samples": {name: len(store) for name, store in stores.items()},
        "num_tokens": {name: int(store.lengths.sum()) for name, store in stores.items()},
        "num_bytes": sum(path.stat().st_size for path in directory.rglob("*.safetensors")),
    }


def manifest_fields(context: RunContext) -> dict[str, Any]:
    """Return the description of how this run's states are made."""
    return {
        "target": context.config.target.model,
        "target_revision": context.config.target.revision,
        "target_fingerprint": context.parts.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint(context.tokenizer),
        "template_fingerprint": template_fingerprint(context.tokenizer, context.template_kwargs),
        "aux_layer_ids": list(context.aux_layer_ids),
        "dtype": str(context.parts.embed_tokens.dtype).removeprefix("torch."),
    }


def capture_by_hf(
    context: RunContext, stores: Sequence[StoreSpec], manifest_fields: Mapping[str, Any]
) -> None:
    """Have every rank run the target over a part of the samples."""
    capture, target = context.config.capture, context.open_capture()
    for store in stores:
        capture_to_store(
            store,
            target,
            shard_tokens=capture.shard_tokens,
            batch_tokens=capture.batch_tokens,
            rank=context.world.rank,
            world_size=context.world.size,
            manifest_fields=manifest_fields,
            progress=context.world.is_main,
            stall_seconds=60 * capture.stall_minutes,
        )


def capture_by_vllm(
    context: RunContext, stores: Sequence[StoreSpec], manifest_fields: Mapping[str, Any]
) -> None:
    """Have rank 0 send the prompts to vLLM, which fills the stores; the other ranks wait for the end."""
    world = context.world
    if not writes_stores_directly(context.config):
        drain_from_vllm(context, stores, manifest_fields)
        return
    capture_through_vllm(
        stores,
        context.captured_target.expected_states(),
        context.servers.endpoints(everywhere=True) if world.is_main else (),
        shard_tokens=context.config.capture.shard_tokens,
        manifest_fields=manifest_fields,
        rank=world.rank,
        progress=world.is_main,
        patience_seconds=context.servers.patience_seconds,
        metrics_port=context.config.capture.metrics_port,
    )


def writes_stores_directly(config: RunConfig) -> bool:
    """Whether vLLM writes stores itself. With Mooncake, online runs share no directory with their servers."""
    mooncake = config.capture.transport is TransportKind.mooncake
    return not (mooncake and config.capture.mode is CaptureMode.online)


def drain_from_vllm(
    context: RunContext, stores: Sequence[StoreSpec], manifest_fields: Mapping[str, Any]
) -> None:
    """Have rank 0 write what vLLM sends through the run's transport; the other ranks wait for the end."""
    world, target = context.world, context.captured_target
    for store in stores:
        with (
            vllm_states(context, store.dataset, store.encoding) if world.is_main else nullcontext() as source
        ):
            drain_to_store(
                store,
                source,
                target.expected_states(),
                shard_tokens=context.config.capture.shard_tokens,
                manifest_fields=manifest_fields,
                progress=world.is_main,
            )


def capture_by_torchspec(
    context: RunContext, stores: Sequence[StoreSpec], manifest_fields: Mapping[str, Any]
) -> None:
    """Have rank 0 write what TorchSpec's engines capture; the other ranks wait for the end."""
    world, target = context.world, context.captured_target
    with torchspec_states(context) if world.is_main else nullcontext() as states:
        for store in stores:
            drain_to_store(
                store,
                None if states is None else torchspec_source(context, states, store.dataset),
                replace(target.expected_states(), dtype=TORCHSPEC_DTYPE),
                shard_tokens=context.config.capture.shard_tokens,
                manifest_fields={**manifest_fields, "dtype": str(TORCHSPEC_DTYPE).removeprefix("torch.")},
                progress=world.is_main,
            )


SOURCES = {
    CaptureSource.hf: capture_by_hf,
    CaptureSource.vllm: capture_by_vllm,
    CaptureSource.torchspec: capture_by_torchspec,
}


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
        cache=cache_settings(context) if name == "train" else None,
        given=given is not None,
    )
    store.verify(
        world.rank,
        world.size,
        num_processes=world.ranks_per_node,
        cache_dir=context.cache_dir,
        progress=world.is_main,
    )
    return store


def cache_settings(context: RunContext) -> CacheSettings | None:
    """Return where this node keeps the training samples that it has read; None for nowhere."""
    capture = context.config.capture
    if capture.cache_dir is None:
        return None
    return CacheSettings(Path(capture.cache_dir), int(capture.cache_gb * 1e9), context.world.ranks_per_node)


@contextmanager
def online_source(context: RunContext, dataset: Dataset) -> Iterator[OnlineStates]:
    """Run the target alongside training, with the recipe's producer and transport."""
    capture = context.config.capture
    if capture.source is CaptureSource.torchspec:
        with (
            torchspec_states(context) as states,
            reported(torchspec_source(context, states, dataset)) as source,
        ):
            yield source
        return
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


def server_engine(config: RunConfig) -> tuple[CaptureEngine, float]:
    """Return the engine that a vLLM server for this run needs, and how many seconds it may take to start."""
    context = RunContext(config, World(rank=0, local_rank=0, size=1))
    return context.capture_engine(), context.start_seconds


@contextmanager
def torchspec_states(context: RunContext) -> Iterator[TorchSpecStates]:
    """Open TorchSpec's engines, which rank 0 starts and the other ranks find."""
    config, target, rank = context.config, context.captured_target, context.world.rank
    # A held-out sample is a prompt and the target's completion of it.
    max_tokens = max(
        config.data.max_tokens + config.evaluate.max_new_tokens, longest_cell_sample(config.evaluate)
    )
    states = TorchSpecStates(
        torchspec_settings(target, config.capture, max_tokens),
        target.parts.head.norm,
        run=run_name(context.output_dir),
        rank=rank,
        log=context.output_dir / f"torchspec-{rank}.log",
    )
    with closing(states):
        yield states


def torchspec_source(context: RunContext, states: TorchSpecStates, dataset: Dataset) -> OnlineStates:
    """Return the samples of one dataset as TorchSpec's engines deliver them."""
    return source_of(context, dataset, states, states, torchspec_format(context.captured_target))
