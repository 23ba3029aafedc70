"""The capture stage: the target's hidden states, in a store or online. Every rank runs it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from data.capture.drain import drain_to_store
from data.capture.given_store import check_samples, check_states
from data.capture.hf import HiddenStateCapture, check_head
from data.capture.offline import capture_to_store
from data.capture.opening import StoreSpec
from data.conversations.saved import load_saved
from data.conversations.template import template_fingerprint
from data.store import HiddenStateStore
from data.store.codec import Encoding
from data.store.index import STATES_VERSION
from data.target.loading import load_target
from data.target.modules import locate
from data.target.tokenizer import tokenizer_fingerprint
from data.vllm.client import capture_through_vllm
from train.config.capture import CaptureMode, CaptureSource, TransportKind
from train.config.run import RunConfig, Stage
from train.context import RunContext
from train.inference.inputs import target_inputs, transformers_inputs, vllm_inputs
from train.stages.data import HELD_OUT
from train.stages.training.states import (
    training_encoding,
    training_samples,
    vllm_states,
)


def capture_inputs(context: RunContext) -> dict[str, Any]:
    capture = context.config.capture
    inputs: dict[str, Any] = {
        "data": context.artifacts[Stage.data].key,
        "answers": context.artifacts[Stage.answers].key,
        "aux_layer_ids": context.drafter.aux_layer_ids,
        "source": capture.source.value,
        "mode": capture.mode.value,
    }
    inputs |= target_inputs(context.config.target, context.target.parts.fingerprint)
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
}


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
        "target_fingerprint": context.target.parts.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint(context.target.tokenizer),
        "template_fingerprint": template_fingerprint(
            context.target.tokenizer, context.target.template_kwargs
        ),
        "aux_layer_ids": list(context.drafter.aux_layer_ids),
        "dtype": str(context.target.parts.embed_tokens.dtype).removeprefix("torch."),
    }


def capture_by_hf(
    context: RunContext, stores: Sequence[StoreSpec], manifest_fields: Mapping[str, Any]
) -> None:
    """Have every rank run the target over a part of the samples."""
    capture, target = context.config.capture, open_capture(context)
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


def open_capture(context: RunContext) -> HiddenStateCapture:
    """Load the target with its capture hooks, and check that its head gives its logits."""
    target = context.target
    model = load_target(target.spec, context.world.device)
    capture = HiddenStateCapture(model, locate(model, target.spec), context.drafter.aux_layer_ids)
    check_head(capture, target.parts.head)
    return capture


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


SOURCES = {
    CaptureSource.hf: capture_by_hf,
    CaptureSource.vllm: capture_by_vllm,
}
