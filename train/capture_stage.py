"""The capture stage: every rank runs the target over its share and meets the others through files."""

from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk

from data.capture.offline import OnlineSource, capture_to_store
from data.samples import HiddenStateSource
from data.store import HiddenStateStore
from data.target import tokenizer_fingerprint
from data.template import template_fingerprint
from train.config import CaptureMode, Stage
from train.context import RunContext
from train.text_stages import HELD_OUT


def capture_inputs(context: RunContext) -> dict[str, Any]:
    capture = context.config.capture
    inputs: dict[str, Any] = {
        "data": context.artifacts[Stage.data].key,
        "answers": context.artifacts[Stage.answers].key,
        "target": context.parts.fingerprint,
        "dtype": context.config.target.dtype,
        "aux_layer_ids": context.aux_layer_ids,
        "mode": capture.mode.value,
    }
    if capture.mode is CaptureMode.offline:
        inputs |= {"max_samples": capture.max_samples, "shard_tokens": capture.shard_tokens}
        inputs["seed"] = context.config.seed
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
    capture = context.open_capture()
    answers = context.artifacts[Stage.answers].directory
    datasets = {name: load_from_disk(str(answers / name)) for name in HELD_OUT}
    if context.config.capture.mode is CaptureMode.offline:
        datasets["train"] = training_samples(context)
    fields = {
        "target": context.config.target.model,
        "target_revision": context.config.target.revision,
        "target_fingerprint": context.parts.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint(context.tokenizer),
        "template_fingerprint": template_fingerprint(context.tokenizer, context.template_kwargs),
        "aux_layer_ids": list(context.aux_layer_ids),
        "dtype": str(capture.dtype).removeprefix("torch."),
    }
    for name, dataset in datasets.items():
        capture_to_store(
            dataset,
            capture,
            directory / name,
            shard_tokens=context.config.capture.shard_tokens,
            batch_tokens=context.config.capture.batch_tokens,
            rank=context.world.rank,
            world_size=context.world.size,
            manifest_fields=fields,
            progress=context.world.is_main,
        )
    stores = {name: HiddenStateStore(directory / name) for name in datasets}
    return {
        "num_samples": {name: len(store) for name, store in stores.items()},
        "num_tokens": {name: sum(store.lengths) for name, store in stores.items()},
        "num_bytes": sum(path.stat().st_size for path in directory.rglob("*.safetensors")),
    }


def open_source(context: RunContext) -> HiddenStateSource:
    """What training reads: the verified store, or the target itself when capture is online."""
    if context.config.capture.mode is CaptureMode.offline:
        store = HiddenStateStore(context.artifacts[Stage.capture].directory / "train")
        if context.world.is_main:
            store.verify()
        return store
    return OnlineSource(
        training_samples(context), context.open_capture(), context.config.capture.batch_tokens
    )
