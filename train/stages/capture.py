"""The capture stage: the target's hidden states, in a store or online. Every rank runs it."""

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.capture.filling import Capture, StoreSpec, fill_store
from data.capture.hf import open_capture
from data.capture.hf_source import TransformersStates
from data.capture.tokens import tokens_fingerprint
from data.samples import CapturedSample, StateShape
from data.store import HiddenStateStore
from data.store.index import STATES_VERSION, as_read_back
from data.store.reader import store_description
from data.target.tokenizer import tokenizer_fingerprint
from eagle31.errors import UserError
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import RunConfig, Stage
from train.context import RunContext
from train.engines.inputs import target_inputs, torchspec_inputs, transformers_inputs, vllm_inputs
from train.stages.data import HELD_OUT, SAMPLED
from train.stages.states import (
    BATCH_TOKENS,
    arriving_states,
    training_samples,
)
from train.target import Target

SHARD_TOKENS = 65_536  # in one file of the store; a writer has the memory of two files
# Fields of a given store that may differ: the same target may be elsewhere, and its fingerprint says whether
# it is the same.
_PLACES = frozenset({"target", "target_revision"})
_SETTINGS = {
    "codec": "capture.codec",
    "aux_layer_ids": "drafter.aux_layer_ids",
}


def capture_inputs(context: RunContext) -> dict[str, Any]:
    capture = context.config.capture
    inputs: dict[str, Any] = {
        "data": context.artifacts[Stage.data].key,
        "answers": context.artifacts[Stage.answers].key,
        "aux_layer_ids": context.drafter.aux_layer_ids,
        "source": capture.source.value,
        "mode": capture.mode.value,
    }
    inputs |= target_inputs(context.config.target, context.target.parts)
    inputs |= SOURCE_INPUTS[capture.source](context.config)
    inputs |= {"codec": capture.codec, "format": STATES_VERSION}
    if capture.mode is CaptureMode.offline:
        inputs |= {"max_samples": context.config.data.max_samples, "seed": context.config.seed}
    if capture.store is not None:
        fields = manifest_fields(context.target, context.drafter.aux_layer_ids)
        fields["codec"] = capture.codec
        inputs["store"] = check_states(capture.store, fields)
    return inputs


SOURCE_INPUTS: dict[CaptureSource, Callable[[RunConfig], dict[str, Any]]] = {
    CaptureSource.hf: lambda config: transformers_inputs(config.target),
    CaptureSource.vllm: lambda config: vllm_inputs(config.vllm.engine_args),
    CaptureSource.torchspec: lambda config: torchspec_inputs(config.torchspec),
}


def run_capture(context: RunContext, directory: Path) -> dict[str, Any]:
    """Write stores of hidden states: `validation/`, `test/`, `sampled/` if the data stage has written it, and
    `train/` if training reads that.
    """
    answers = context.artifacts[Stage.answers]
    capture, data = context.config.capture, context.artifacts[Stage.data]
    datasets = {name: answers.dataset(name) for name in HELD_OUT}
    if (data.directory / SAMPLED).exists():
        datasets[SAMPLED] = data.dataset(SAMPLED)
    # Replay equals serving only if it reads the exact states.
    codecs = dict.fromkeys(datasets, "exact") | {"train": capture.codec}
    tokens = {name: tokens_fingerprint(dataset) for name, dataset in datasets.items()}
    samples, tokens["train"] = training_samples(data), data.summary["tokens_fingerprint"]
    if capture.store is not None:
        check_samples(capture.store, len(samples), tokens["train"])
    elif capture.mode is CaptureMode.offline:
        datasets["train"] = samples
    made = manifest_fields(context.target, context.drafter.aux_layer_ids)
    specs = [
        StoreSpec(directory / name, dataset, codecs[name], tokens[name], made)
        for name, dataset in datasets.items()
    ]
    SOURCES[capture.source](context, specs)
    stores = {name: HiddenStateStore(directory / name) for name in datasets}
    if capture.store is not None:
        stores["train"] = HiddenStateStore(capture.store, given=True)
    return {
        "num_samples": {name: len(store) for name, store in stores.items()},
        "num_tokens": {name: int(store.lengths.sum()) for name, store in stores.items()},
        "num_bytes": sum(path.stat().st_size for path in directory.rglob("*.safetensors")),
    }


def manifest_fields(target: Target, aux_layer_ids: Sequence[int]) -> dict[str, Any]:
    """Return the description of how this run's states are made."""
    return {
        "target": target.settings.model,
        "target_revision": target.settings.revision,
        "target_fingerprint": target.parts.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer),
        "template_fingerprint": target.template_fingerprint,
        "aux_layer_ids": list(aux_layer_ids),
        "dtype": target.parts.dtype_name,
    }


def capture_by_hf(context: RunContext, stores: Sequence[StoreSpec]) -> None:
    """Have every rank run the target over a part of the samples."""
    spec, parts = context.target.spec, context.target.parts
    target = open_capture(spec, parts, context.drafter.aux_layer_ids, context.world.device)
    for store in stores:
        states = TransformersStates(store.dataset, target, store.codec, BATCH_TOKENS)
        _fill(context, store, states.captured)


def capture_by_engines(context: RunContext, stores: Sequence[StoreSpec]) -> None:
    """Have every rank write a part of the samples, as the run's servers or engines deliver them."""
    for store in stores:

        def capture(
            _: Sequence[int], missing: Sequence[int], store: StoreSpec = store
        ) -> Generator[tuple[int, CapturedSample | str], None, None]:
            # The states are exact on their way: the writer encodes them.
            codec = "exact"
            with arriving_states(context, store.dataset, codec, checks_refused=False) as source:
                yield from source.captured(missing)

        _fill(context, store, capture)


def _fill(context: RunContext, store: StoreSpec, capture: Capture) -> None:
    world, parts = context.world, context.target.parts
    fill_store(
        store,
        capture,
        StateShape(len(context.drafter.aux_layer_ids), parts.hidden_size, parts.dtype),
        shard_tokens=SHARD_TOKENS,
        rank=world.rank,
        world_size=world.size,
        progress=world.is_main,
    )


def check_states(location: str, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Compare how a given store's states were made with how this run would make them.

    Args:
        location: a directory or a URL.
        expected: the fields of this run's own store.

    Returns:
        The store's fields, without the places of the target and of its shards.

    Raises:
        UserError: there is no finished store, or a field differs.
    """
    fields = store_description(location)
    for name, value in as_read_back(expected).items():
        if name not in _PLACES and fields.get(name) != value:
            change = f"change {_SETTINGS[name]}, " if name in _SETTINGS else ""
            remedy = f"Its {name} is {fields.get(name)}, and this run's is {value}; {change}"
            raise UserError("capture.store", location, f"{remedy}give another store, or null to capture.")
    return {name: value for name, value in fields.items() if name not in _PLACES}


def check_samples(location: str, num_samples: int, tokens_fingerprint: str) -> None:
    """Raise UserError if a given store holds states of other samples than those of the training data."""
    fields = store_description(location)
    expected = {"dataset_samples": num_samples, "tokens_fingerprint": tokens_fingerprint}
    if any(fields[name] != value for name, value in expected.items()):
        remedy = (
            f"It holds {fields['dataset_samples']:,} samples of other data than this run's {num_samples:,}; "
            "give the run the data, the split and the seed that the store was captured with."
        )
        raise UserError("capture.store", location, remedy)


SOURCES = {
    CaptureSource.hf: capture_by_hf,
    CaptureSource.vllm: capture_by_engines,
    CaptureSource.torchspec: capture_by_engines,
}
