"""Capture to a store: its missing samples, capture in this process, and finishing it."""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from safetensors import safe_open

from data.capture.tokens import TokenRows, dataset_lengths, dataset_rows, tokens_fingerprint
from data.capture.worker import TargetCapture
from data.progress import Progress, tracked
from data.samples import CapturedSample
from data.store.codec import Encoding, Rows, encoded_bytes
from data.store.index import (
    MANIFEST,
    as_read_back,
    claim,
    is_written,
    manifest_content,
    missing_ids,
    write_manifest,
)
from data.store.shards import FinishedShards, ShardRecord
from data.store.writer import StoreWriter, disk_full, remove_all_leftovers
from eagle31.errors import UserError

_POLL_SECONDS = 0.5


class CapturedStates(Protocol):
    """The properties that decide how large captured states are."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


class SizedCapture(CapturedStates, TargetCapture, Protocol):
    """Runs the target and says how large its states are."""


@dataclass(frozen=True)
class StoreSpec:
    """A store that is to be filled with the states of a dataset."""

    directory: Path
    dataset: Dataset  # columns input_ids and loss_mask
    encoding: Encoding


def capture_to_store(
    store: StoreSpec,
    capture: SizedCapture,
    *,
    shard_tokens: int,
    batch_tokens: int,
    rank: int = 0,
    world_size: int = 1,
    manifest_fields: Mapping[str, Any],
    progress: bool = False,
) -> None:
    """Capture this rank's part of the missing samples; return on every rank once the store is finished.

    Ranks share only the directory.

    Args:
        shard_tokens: the approximate number of tokens per file, which memory holds until it is written.
        batch_tokens: the most tokens in one forward pass, with padding.
        manifest_fields: JSON values that describe how the states are made.

    Raises:
        UserError: the disk cannot hold the store, or the directory holds another store. Finished shards are
            kept.
    """
    dataset, output_dir, encoding = store.dataset, store.directory, store.encoding
    fields = store_fields(store, manifest_fields)
    missing = open_store(output_dir, fields, rank)
    if rank == 0 and missing:
        check_space(store, missing, capture)
    lengths = dataset_lengths(dataset)
    mine = rank_slice(lengths, missing, rank, world_size)
    if mine:
        writer = StoreWriter(output_dir, f"hf-{rank}", encoding, shard_tokens)
        total = sum(lengths[sample_id] for sample_id in mine)
        bar = Progress("capture", total, "tokens", shown=progress)
        with writer, bar:
            for sample_id, sample in capture_samples(dataset, lengths, mine, capture, batch_tokens):
                writer.append(sample_id, sample)
                bar.update(len(sample.input_ids))
    finish_store(store, fields, rank, progress=progress)


def capture_samples(
    dataset: Dataset,
    lengths: Sequence[int],
    sample_ids: Sequence[int],
    capture: TargetCapture,
    batch_tokens: int,
) -> Iterator[tuple[int, CapturedSample]]:
    """Yield captured samples, the longest first. Samples of similar length are captured together."""
    tokens = TokenRows(dataset)
    for indices in batches_by_length([lengths[i] for i in sample_ids], batch_tokens):
        batch = [sample_ids[index] for index in indices]
        rows = tokens.read(batch)
        states = capture.capture([input_ids for input_ids, _ in rows])
        for sample_id, row, (aux, final) in zip(batch, rows, states, strict=True):
            yield sample_id, CapturedSample(*row, aux, final)


def store_fields(store: StoreSpec, manifest_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a store's description: `manifest_fields`, its encoding, and its dataset."""
    return as_read_back(
        {
            **manifest_fields,
            "encoding": store.encoding.to_json(),
            "tokens_fingerprint": tokens_fingerprint(store.dataset),
            "dataset_samples": len(store.dataset),
        }
    )


def open_store(directory: Path, fields: Mapping[str, Any], rank: int = 0) -> list[int]:
    """Reserve the directory for this capture. Every rank calls this.

    Args:
        fields: from `store_fields`.

    Returns:
        The ids of the missing samples, ascending. Other writers may be capturing them.

    Raises:
        UserError: the directory holds another capture.
    """
    claim(directory, fields, rank)
    missing = missing_ids(directory, FinishedShards(directory).records(), fields["dataset_samples"])
    if missing and rank == 0:
        # The store was finished and has lost a shard.
        (directory / MANIFEST).unlink(missing_ok=True)
    return missing


def rank_slice(lengths: Sequence[int], missing: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return the missing samples that this rank captures.

    A sample's rank depends on the lengths only: ranks that start at different times see different samples
    missing, and still leave none out. Lengths are distributed evenly.
    """
    by_length = np.argsort(-np.asarray(lengths), kind="stable")
    mine = np.zeros(len(lengths), dtype=bool)
    mine[by_length[rank::world_size]] = True
    return [sample_id for sample_id in missing if mine[sample_id]]


def estimate_bytes(rows: NDArray, states: CapturedStates, encoding: Encoding) -> int:
    """Return the size of samples in a store without its headers. rows int64 [n, 3], from `dataset_rows`."""
    num_layers, total = len(states.aux_layer_ids), Rows(*map(int, rows.sum(axis=0)))
    return encoded_bytes(encoding, total, num_layers, states.hidden_size, states.dtype)


def check_space(store: StoreSpec, missing: Sequence[int], states: CapturedStates) -> None:
    """Print how much will be captured, and refuse what the disk cannot hold.

    Raises:
        UserError: the disk has too little free space.
    """
    rows = dataset_rows(store.dataset, store.encoding)[missing]
    needed, free = estimate_bytes(rows, states, store.encoding), shutil.disk_usage(store.directory).free
    print(
        f"capture: {len(rows):,} samples, {rows[:, 0].sum():,} tokens to {store.directory}, "
        f"{needed / 1e9:.2f} GB ({store.encoding.codec}) of {free / 1e9:.2f} GB free",
        file=sys.stderr,
    )
    if needed > free:
        what = f"The store needs {needed / 1e9:.2f} GB where {free / 1e9:.2f} GB are free"
        raise disk_full(store.directory, what)


def finish_store(
    store: StoreSpec, fields: Mapping[str, Any], rank: int = 0, *, progress: bool = False
) -> None:
    """Wait until every sample is captured or refused. Rank 0 declares the store finished; the others wait.

    Args:
        fields: from `store_fields`.

    Raises:
        UserError: a shard holds other tokens than the dataset, or has another encoding.
    """
    directory, dataset = store.directory, store.dataset
    shards = FinishedShards(directory)
    while missing_ids(directory, shards.records(), len(dataset)):
        time.sleep(_POLL_SECONDS)
    if rank == 0:
        remove_all_leftovers(directory)
    records = shards.records()
    content = manifest_content(directory, records, fields)
    if rank == 0 and not is_written(directory, content):
        tokens = TokenRows(dataset)
        for record in tracked(records, "check the store", "shards", shown=progress):
            _check_shard(directory, record, tokens, fields)
        write_manifest(directory, fields)
    # The manifest of an earlier run may still exist while a damaged shard is replaced.
    while not is_written(directory, content):
        time.sleep(_POLL_SECONDS)


def _check_shard(directory: Path, record: ShardRecord, tokens: TokenRows, fields: Mapping[str, Any]) -> None:
    path = directory / record.file
    if record.encoding.to_json() != fields["encoding"]:
        raise UserError("capture", path, f"Its encoding is {record.encoding.to_json()}; delete it.")
    with safe_open(path, framework="np") as file:
        ids, mask = file.get_tensor("input_ids"), file.get_tensor("loss_mask")
    lengths, expected_ids, expected_mask = tokens.flat(record.sample_ids)
    same = np.array_equal(lengths, record.lengths) and np.array_equal(ids, expected_ids)
    if not same or not np.array_equal(mask, expected_mask):
        remedy = "It holds other tokens than the dataset; delete it and run again to capture it again."
        raise UserError("capture", path, remedy)


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices, the longest first, with at most `batch_tokens` tokens including padding.

    A batch has at least one index.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
