"""Capture to a store in this process."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from datasets import Dataset

from data.capture.finishing import finish_store
from data.capture.opening import CapturedStates, StoreSpec, check_space, open_store, store_fields
from data.capture.tokens import TokenRows, dataset_lengths
from data.capture.worker import TargetCapture
from data.progress import STALL_SECONDS, Progress
from data.samples import CapturedSample
from data.store.writer import StoreWriter


class SizedCapture(CapturedStates, TargetCapture, Protocol):
    """Runs the target and says how large its states are."""


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
    stall_seconds: float = STALL_SECONDS,
) -> None:
    """Capture this rank's part of the missing samples; return on every rank once the store is finished.

    Ranks share only the directory.

    Args:
        shard_tokens: the approximate number of tokens per file, which memory holds until it is written.
        batch_tokens: the most tokens in one forward pass, with padding.
        manifest_fields: JSON values that describe how the states are made.
        stall_seconds: the longest time without a new sample while rank 0 waits for the other ranks.

    Raises:
        UserError: the disk cannot hold the store, the directory holds another store, or other ranks hang.
            Finished shards are kept.
    """
    dataset, output_dir, encoding = store.dataset, store.directory, store.encoding
    fields = store_fields(store, manifest_fields)
    missing = open_store(output_dir, fields, rank)
    if rank == 0 and missing:
        check_space(store, missing, capture)
    lengths = dataset_lengths(dataset)
    mine = rank_slice(lengths, rank, world_size)
    if to_capture := set(missing).intersection(mine):
        writer = StoreWriter(output_dir, f"hf-{rank}", encoding, shard_tokens)
        total = sum(lengths[sample_id] for sample_id in to_capture)
        bar = Progress("capture", total, "tokens", shown=progress)
        with writer, bar:
            for sample_id, sample in capture_samples(
                dataset, lengths, mine, to_capture, capture, batch_tokens
            ):
                writer.append(sample_id, sample)
                bar.update(len(sample.input_ids))
    finish_store(store, fields, rank, progress=progress, stall_seconds=stall_seconds)


def capture_samples(
    dataset: Dataset,
    lengths: Sequence[int],
    sample_ids: Sequence[int],
    missing: Collection[int],
    capture: TargetCapture,
    batch_tokens: int,
) -> Iterator[tuple[int, CapturedSample]]:
    """Yield captured samples, the longest first. Samples of similar length are captured together.

    Args:
        sample_ids: those that are divided into batches.
        missing: those of them that are captured. A batch that has some of them runs with all of its samples,
            because other batches round differently: a resumed capture has the states of an uninterrupted one.
    """
    tokens = TokenRows(dataset)
    for indices in batches_by_length([lengths[i] for i in sample_ids], batch_tokens):
        batch = [sample_ids[index] for index in indices]
        if not any(sample_id in missing for sample_id in batch):
            continue
        rows = tokens.read(batch)
        states = capture.capture([input_ids for input_ids, _ in rows])
        for sample_id, row, (aux, final) in zip(batch, rows, states, strict=True):
            if sample_id in missing:
                yield sample_id, CapturedSample(*row, aux, final)


def rank_slice(lengths: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return the samples that this rank captures, ascending.

    They depend on the lengths only: ranks that start at different times see different samples missing, and
    still leave none out. Lengths are distributed evenly.
    """
    by_length = np.argsort(-np.asarray(lengths), kind="stable")
    return sorted(by_length[rank::world_size].tolist())


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
