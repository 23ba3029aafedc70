"""Captured states into a store: what is still missing of it, whoever captures, and its end."""

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
    """What decides how large the states are."""

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
    """A store that is to be filled."""

    directory: Path
    dataset: Dataset  # columns input_ids and loss_mask
    encoding: Encoding


def capture_to_store(
    wanted: StoreSpec,
    capture: SizedCapture,
    *,
    shard_tokens: int,
    batch_tokens: int,
    rank: int = 0,
    world_size: int = 1,
    manifest_fields: Mapping[str, Any],
    progress: bool = False,
) -> None:
    """Captures this rank's share of what is missing; returns on every rank once the whole store is finished.

    Ranks share nothing but the directory.

    Args:
        shard_tokens: about how many tokens a file holds; held in memory, encoded, until it is written.
        batch_tokens: the most tokens, padding included, in one forward pass.
        manifest_fields: JSON values that say what the states are made with.

    Raises:
        UserError: the disk cannot hold the store, or the directory holds another one. Shards that are
            finished by then are kept.
    """
    dataset, output_dir, encoding = wanted.dataset, wanted.directory, wanted.encoding
    fields = store_fields(wanted, manifest_fields)
    missing = open_store(output_dir, fields, rank)
    if rank == 0 and missing:
        check_space(wanted, missing, capture)
    lengths = dataset_lengths(dataset)
    mine = rank_share(lengths, missing, rank, world_size)
    if mine:
        writer = StoreWriter(output_dir, f"hf-{rank}", encoding, shard_tokens)
        total = sum(lengths[sample_id] for sample_id in mine)
        bar = Progress("capture", total, "tokens", shown=progress)
        with writer, bar:
            for sample_id, sample in capture_samples(dataset, lengths, mine, capture, batch_tokens):
                writer.append(sample_id, sample)
                bar.update(len(sample.input_ids))
    finish_store(wanted, fields, rank, progress=progress)


def capture_samples(
    dataset: Dataset,
    lengths: Sequence[int],
    sample_ids: Sequence[int],
    capture: TargetCapture,
    batch_tokens: int,
) -> Iterator[tuple[int, CapturedSample]]:
    """Captures together what is of like length; longest first, so that what does not fit fails at once."""
    tokens = TokenRows(dataset)
    for places in batches_by_length([lengths[i] for i in sample_ids], batch_tokens):
        batch = [sample_ids[place] for place in places]
        rows = tokens.read(batch)
        states = capture.capture([input_ids for input_ids, _ in rows])
        for sample_id, row, (aux, last) in zip(batch, rows, states, strict=True):
            yield sample_id, CapturedSample(*row, aux, last)


def store_fields(wanted: StoreSpec, manifest_fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a store says of its making: `manifest_fields`, its encoding, and which samples it is of."""
    return as_read_back(
        {
            **manifest_fields,
            "encoding": wanted.encoding.to_json(),
            "tokens_fingerprint": tokens_fingerprint(wanted.dataset),
            "dataset_samples": len(wanted.dataset),
        }
    )


def open_store(directory: Path, fields: Mapping[str, Any], rank: int = 0) -> list[int]:
    """Takes the directory for this capture; every rank calls.

    Args:
        fields: of `store_fields`.

    Returns:
        The samples that are still to be captured, ascending. Other writers may be at work on them.

    Raises:
        UserError: it holds another capture.
    """
    claim(directory, fields, rank)
    missing = missing_ids(directory, FinishedShards(directory).records(), fields["dataset_samples"])
    if missing and rank == 0:
        # Of a store that was finished and has lost a shard.
        (directory / MANIFEST).unlink(missing_ok=True)
    return missing


def rank_share(lengths: Sequence[int], missing: Sequence[int], rank: int, world_size: int) -> list[int]:
    """What this rank captures of `missing`.

    Who captures a sample depends on the lengths alone: ranks that start at different times see different
    samples missing, and still leave none out. All lengths are dealt out evenly.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    mine = np.zeros(len(lengths), dtype=bool)
    mine[order[rank::world_size]] = True
    return [sample_id for sample_id in missing if mine[sample_id]]


def estimate_bytes(rows: NDArray, states: CapturedStates, encoding: Encoding) -> int:
    """What samples with these rows take in a store, but for its headers. int64 [n, 3], of `dataset_rows`."""
    num_layers, total = len(states.aux_layer_ids), Rows(*map(int, rows.sum(axis=0)))
    return encoded_bytes(encoding, total, num_layers, states.hidden_size, states.dtype)


def check_space(wanted: StoreSpec, missing: Sequence[int], states: CapturedStates) -> None:
    """Says how much is to be captured, and refuses what the disk cannot hold.

    Raises:
        UserError: too little is free.
    """
    rows = dataset_rows(wanted.dataset, wanted.encoding)[missing]
    needed, free = estimate_bytes(rows, states, wanted.encoding), shutil.disk_usage(wanted.directory).free
    print(
        f"capture: {len(rows):,} samples, {rows[:, 0].sum():,} tokens to {wanted.directory}, "
        f"{needed / 1e9:.2f} GB ({wanted.encoding.codec}) of {free / 1e9:.2f} GB free",
        file=sys.stderr,
    )
    if needed > free:
        what = f"Needs {needed / 1e9:.2f} GB where {free / 1e9:.2f} GB are free"
        raise disk_full(wanted.directory, what)


def finish_store(
    wanted: StoreSpec, fields: Mapping[str, Any], rank: int = 0, *, progress: bool = False
) -> None:
    """Waits until every sample is captured or refused; rank 0 declares the store finished, the others wait.

    Args:
        fields: of `store_fields`.

    Raises:
        UserError: a shard holds other tokens than the dataset, or has another encoding.
    """
    directory, dataset = wanted.directory, wanted.dataset
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
    # The manifest of an earlier run may still be there while a damaged shard is replaced.
    while not is_written(directory, content):
        time.sleep(_POLL_SECONDS)


def _check_shard(directory: Path, record: ShardRecord, tokens: TokenRows, fields: Mapping[str, Any]) -> None:
    path = directory / record.file
    if record.encoding.to_json() != fields["encoding"]:
        raise UserError("capture", path, f"Its encoding is {record.encoding.to_json()}; delete it.")
    with safe_open(path, framework="np") as file:
        ids, mask = file.get_tensor("input_ids"), file.get_tensor("loss_mask")
    lengths, wanted_ids, wanted_mask = tokens.flat(record.sample_ids)
    same = np.array_equal(lengths, record.lengths) and np.array_equal(ids, wanted_ids)
    if not same or not np.array_equal(mask, wanted_mask):
        remedy = "Holds other tokens than the dataset; delete it and run again: it is captured anew."
        raise UserError("capture", path, remedy)


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Places, longest first, in batches of at most `batch_tokens` with padding, at least one each."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
