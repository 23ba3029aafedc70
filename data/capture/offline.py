"""Captured states to disk for many epochs, or straight into training."""

import errno
import hashlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow.compute as pc
import torch
from datasets import Dataset
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from data.samples import CapturedSample
from data.store import (
    as_read_back,
    manifest_content,
    missing_shards,
    plan_shards,
    read_manifest,
    write_manifest,
    write_shard,
)
from eagle31.errors import UserError
from eagle31.json_files import read_json, write_json

_SETTINGS = "capture.json"
_POLL_SECONDS = 0.5
_DISK_FULL = f"(os error {errno.ENOSPC})"  # safetensors reports the operating system's error as text only
_TOKEN_BYTES = 5  # input_ids and loss_mask


class Capture(Protocol):
    """Whatever runs the target, such as `HiddenStateCapture`."""

    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype

    def capture(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]: ...


class OnlineSource:
    """Captures samples when they are asked for; reads like a store, with nothing on disk.

    Args:
        dataset: columns input_ids and loss_mask.
        batch_tokens: the most tokens, padding included, in one forward pass.
    """

    def __init__(self, dataset: Dataset, capture: Capture, batch_tokens: int) -> None:
        self.capture = capture
        self.batch_tokens = batch_tokens
        self.lengths = dataset_lengths(dataset)
        self._tokens = dataset.with_format("torch", columns=["input_ids", "loss_mask"])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> CapturedSample:
        return self.get_many([index])[0]

    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]:
        """Captures together what is of like length; returns in the order asked."""
        samples = dict(self.capture_batches(indices))
        return [samples[place] for place in range(len(indices))]

    def capture_batches(self, indices: Sequence[int]) -> Iterator[tuple[int, CapturedSample]]:
        """Yields (place in `indices`, sample), longest first, so that what does not fit fails at once."""
        for places in _batches_by_length([self.lengths[i] for i in indices], self.batch_tokens):
            rows = [self._tokens[int(indices[place])] for place in places]
            states = self.capture.capture([row["input_ids"] for row in rows])
            for place, row, (aux, last) in zip(places, rows, states, strict=True):
                yield place, CapturedSample(row["input_ids"], row["loss_mask"], aux, last)


def capture_to_store(
    dataset: Dataset,
    capture: Capture,
    output_dir: Path,
    *,
    shard_tokens: int,
    batch_tokens: int,
    rank: int = 0,
    world_size: int = 1,
    manifest_fields: Mapping[str, Any],
    progress: bool = False,
) -> None:
    """Captures this rank's unfinished shards; returns on every rank once the whole store is finished.

    Ranks share nothing but the directory: rank r does shards r, r + world_size, ..., and rank 0 writes the
    manifest when it sees all of them.

    Args:
        dataset: columns input_ids and loss_mask.
        shard_tokens: about how many tokens a file holds; held in memory while it is captured.
        batch_tokens: the most tokens, padding included, in one forward pass.
        manifest_fields: JSON values that say what the states are made with; a fingerprint of the tokens is
            added to them.

    Raises:
        UserError: the disk cannot hold the store, or the directory holds another one. Shards that are
            finished by then are kept.
    """
    source = OnlineSource(dataset, capture, batch_tokens)
    fields = {**manifest_fields, "tokens_fingerprint": tokens_fingerprint(dataset)}
    _claim(output_dir, {**fields, "shard_tokens": shard_tokens}, rank)
    plan = plan_shards(source.lengths, shard_tokens)
    missing = missing_shards(output_dir, source.lengths, shard_tokens)
    if rank == 0 and missing:
        _check_space(output_dir, capture, _num_tokens(source, [plan[index] for index in missing]))
    mine = [index for index in missing if index % world_size == rank]
    shown = progress and sys.stderr.isatty()
    total = _num_tokens(source, [plan[index] for index in mine])
    with tqdm(total=total, unit="tok", unit_scale=True, desc="capture", disable=not shown) as bar:
        for index in mine:
            _capture_shard(source, plan[index], output_dir, index, bar)
    _finish(output_dir, source.lengths, shard_tokens, rank, fields)


def dataset_lengths(dataset: Dataset) -> list[int]:
    """Tokens of each sample, without making lists of them."""
    tables = dataset.with_format("arrow", columns=["input_ids"]).iter(batch_size=1000)
    return [length for table in tables for length in pc.list_value_length(table["input_ids"]).to_pylist()]


def tokens_fingerprint(dataset: Dataset) -> str:
    """sha256 of the samples: their lengths, ids and masks, however the dataset came to be."""
    digest = hashlib.sha256()
    for table in dataset.with_format("arrow", columns=["input_ids", "loss_mask"]).iter(batch_size=1000):
        ids, mask = table["input_ids"], table["loss_mask"]
        digest.update(pc.list_value_length(ids).to_numpy().astype("<i4").tobytes())
        digest.update(pc.list_flatten(ids).to_numpy().astype("<i4").tobytes())
        digest.update(pc.list_flatten(mask).to_numpy().astype("u1").tobytes())
    return digest.hexdigest()


def estimate_bytes(num_tokens: int, capture: Capture) -> int:
    """What `num_tokens` take in a store."""
    states = (len(capture.aux_layer_ids) + 1) * capture.hidden_size * capture.dtype.itemsize
    return num_tokens * (states + _TOKEN_BYTES)


def _claim(output_dir: Path, settings: Mapping[str, Any], rank: int) -> None:
    """Says what the directory is for, or refuses one that is for something else."""
    output_dir.mkdir(parents=True, exist_ok=True)
    path, settings = output_dir / _SETTINGS, as_read_back(settings)
    if path.exists():
        found = read_json(path)
        names = sorted(found.keys() | settings.keys())
        changed = [name for name in names if found.get(name) != settings.get(name)]
        if changed:
            remedy = f"Holds a capture with another {', '.join(changed)}; delete it or choose another."
            raise UserError("output_dir", output_dir, remedy)
    elif rank == 0:
        write_json(path, settings)


def _check_space(output_dir: Path, capture: Capture, num_tokens: int) -> None:
    needed, free = estimate_bytes(num_tokens, capture), shutil.disk_usage(output_dir).free
    print(
        f"capture: {num_tokens:,} tokens to {output_dir}, {needed / 1e9:.2f} GB of {free / 1e9:.2f} GB free",
        file=sys.stderr,
    )
    if needed > free:
        raise _does_not_fit(output_dir, f"Needs {needed / 1e9:.2f} GB where {free / 1e9:.2f} GB are free")


def _does_not_fit(output_dir: Path, what: str) -> UserError:
    remedy = f"{what}; choose another disk, lower capture.max_samples, or set capture.mode=online."
    return UserError("output_dir", output_dir, remedy)


def _num_tokens(source: OnlineSource, shards: Sequence[range]) -> int:
    return sum(source.lengths[i] for shard in shards for i in shard)


def _capture_shard(source: OnlineSource, shard: range, output_dir: Path, index: int, bar: tqdm) -> None:
    samples: dict[int, CapturedSample] = {}
    for place, sample in source.capture_batches(shard):
        aux, last = sample.aux_hidden_states.cpu(), sample.last_hidden_states.cpu()
        samples[place] = replace(sample, aux_hidden_states=aux, last_hidden_states=last)
        bar.update(len(sample.input_ids))
    try:
        write_shard(output_dir, index, [samples[place] for place in range(len(shard))])
    except SafetensorError as error:
        if _DISK_FULL not in str(error):
            raise
        raise _does_not_fit(output_dir, "The disk is full; finished shards are kept") from error


def _finish(
    output_dir: Path, lengths: Sequence[int], shard_tokens: int, rank: int, fields: Mapping[str, Any]
) -> None:
    """Waits for all shards; rank 0 writes the manifest, the others wait for exactly that one."""
    while missing_shards(output_dir, lengths, shard_tokens):
        time.sleep(_POLL_SECONDS)
    if rank == 0 and read_manifest(output_dir) != manifest_content(output_dir, fields):
        write_manifest(output_dir, fields)
    # The manifest of an earlier run may still be there while a damaged shard is replaced.
    while read_manifest(output_dir) != manifest_content(output_dir, fields):
        time.sleep(_POLL_SECONDS)


def _batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Places, longest first, in batches of at most `batch_tokens` with padding, at least one each."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
