"""The capture stage: every rank runs the target over its share and meets the others through files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk

from data.capture.offline import StoreSpec, capture_to_store
from data.samples import HiddenStateSource
from data.store import HiddenStateStore
from data.store.codec import Encoding
from data.store.index import FORMAT
from data.target.tokenizer import tokenizer_fingerprint
from data.text.template import template_fingerprint
from train.config.capture import CaptureMode, CaptureSource
from train.config.run import Stage
from train.context import RunContext
from train.inference.online import capture_by_torchspec, online_source
from train.inference.vllm import capture_by_vllm
from train.stages.data import HELD_OUT


def capture_inputs(context: RunContext) -> dict[str, Any]:
    capture = context.config.capture
    inputs: dict[str, Any] = {
        "data": context.artifacts[Stage.data].key,
        "answers": context.artifacts[Stage.answers].key,
        "target": context.parts.fingerprint,
        "dtype": context.config.target.dtype,
        "aux_layer_ids": context.aux_layer_ids,
        "source": capture.source.value,
        "mode": capture.mode.value,
    }
    inputs |= {"codec": capture.codec, "final_states": capture.final_states, "format": FORMAT}
    if capture.mode is CaptureMode.offline:
        inputs |= {"max_samples": capture.max_samples, "seed": context.config.seed}
    return inputs


def training_samples(context: RunContext) -> Dataset:
    """The tokenised data, or a random `capture.max_samples` of it."""
    dataset = load_from_disk(str(context.artifacts[Stage.data].directory / "train"))
    limit = context.config.capture.max_samples
    if limit is None or limit >= len(dataset):
        return dataset
    return dataset.shuffle(seed=context.config.seed).select(range(limit)).flatten_indices()


def run_capture(context: RunContext, directory: Path) -> dict[str, Any]:
    """Stores of hidden states: `train/` unless capture is online, `validation/`, `test/`."""
    answers = context.artifacts[Stage.answers].directory
    datasets = {name: load_from_disk(str(answers / name)) for name in HELD_OUT}
    capture = context.config.capture
    if capture.mode is CaptureMode.offline:
        datasets["train"] = training_samples(context)
    fields = {
        "target": context.config.target.model,
        "target_revision": context.config.target.revision,
        "target_fingerprint": context.parts.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint(context.tokenizer),
        "template_fingerprint": template_fingerprint(context.tokenizer, context.template_kwargs),
        "aux_layer_ids": list(context.aux_layer_ids),
        "dtype": str(context.parts.embed_tokens.dtype).removeprefix("torch."),
    }
    # Replay gives what is served only from the states as they are.
    encodings = dict.fromkeys(HELD_OUT, Encoding()) | {"train": Encoding(capture.codec, capture.final_states)}
    wanted = [StoreSpec(directory / name, dataset, encodings[name]) for name, dataset in datasets.items()]
    SOURCES[capture.source](context, wanted, fields)
    stores = {name: HiddenStateStore(directory / name) for name in datasets}
    return {
        "num_samples": {name: len(store) for name, store in stores.items()},
        "num_tokens": {name: sum(store.lengths) for name, store in stores.items()},
        "num_bytes": sum(path.stat().st_size for path in directory.rglob("*.safetensors")),
    }


def capture_by_hf(
    context: RunContext, stores: Sequence[StoreSpec], manifest_fields: Mapping[str, Any]
) -> None:
    """Every rank runs the target over its share."""
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
        )


SOURCES = {
    CaptureSource.hf: capture_by_hf,
    CaptureSource.vllm: capture_by_vllm,
    CaptureSource.torchspec: capture_by_torchspec,
}


@contextmanager
def opened_source(context: RunContext) -> Iterator[HiddenStateSource]:
    """What training reads while it runs: the verified store, or what comes online."""
    if context.config.capture.mode is CaptureMode.offline:
        yield open_source(context)
    else:
        with online_source(context, training_samples(context)) as source:
            yield source


def open_source(context: RunContext) -> HiddenStateStore:
    """The store that training reads, verified."""
    store = HiddenStateStore(context.artifacts[Stage.capture].directory / "train")
    if context.world.is_main:
        store.verify(progress=True)
    return store
