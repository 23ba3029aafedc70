"""Filling a store with the states of a dataset: what it lacks, its space, its samples, and its end."""

import shutil
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from data.capture.tokens import dataset_lengths, dataset_rows
from data.progress import Progress
from data.refusals import check_refusals, refusal_lines, retry_remedy
from data.samples import CapturedSample, StateShape
from data.store.codec import Rows, encoded_bytes
from data.store.index import (
    MANIFEST,
    as_read_back,
    claim,
    describes,
    missing_ids,
    refuse,
    refused,
    write_manifest,
)
from data.store.shards import FinishedShards
from data.store.writer import StoreWriter, disk_full, remove_leftovers

_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.5, 10.0

# From all samples of a rank and those of them that are missing: each missing one with its states, or with the
# reason why it is refused.
Capture = Callable[[Sequence[int], Sequence[int]], Generator[tuple[int, CapturedSample | str], None, None]]


@dataclass(frozen=True)
class StoreSpec:
    """A store that is to be filled with the states of a dataset."""

    directory: Path
    dataset: Dataset  # columns input_ids and loss_mask
    codec: str
    tokens_fingerprint: str  # of the dataset
    made: Mapping[str, Any]  # JSON values that describe how the states are made

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The store's description, as it reads back from its files."""
        return as_read_back(
            {
                **self.made,
                "codec": self.codec,
                "tokens_fingerprint": self.tokens_fingerprint,
                "dataset_samples": len(self.dataset),
            }
        )

    @cached_property
    def shards(self) -> FinishedShards:
        return FinishedShards(self.directory)


def fill_store(
    store: StoreSpec,
    capture: Capture,
    shape: StateShape,
    *,
    shard_tokens: int,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = False,
) -> None:
    """Write this rank's part of the missing samples; return on every rank once the store is finished.

    Ranks share only the directory.

    Args:
        shape: of the target's states.
        shard_tokens: the approximate number of tokens per file, which memory holds until it is written.

    Raises:
        UserError: the disk cannot hold the store, the directory holds another store, or too many samples are
            refused. Finished shards are kept.
    """
    missing = open_store(store, rank)
    if rank == 0 and missing:
        check_store_refusals(store)
        check_space(store, missing, shape)
    lengths = dataset_lengths(store.dataset)
    mine = rank_slice(lengths, rank, world_size)
    own = sorted(set(missing).intersection(mine))
    if own:
        name = f"rank-{rank}"
        total = sum(lengths[sample_id] for sample_id in own)
        with (
            Progress("capture", total, "tokens", shown=progress) as bar,
            StoreWriter(store.directory, name, store.codec, shard_tokens) as writer,
            closing(capture(mine, own)) as samples,
        ):
            refusals: dict[int, str] = {}
            for sample_id, sample in samples:
                if isinstance(sample, str):
                    refuse(store.directory, sample_id, sample)
                    refusals[sample_id] = sample
                    remedy = retry_remedy(store.directory)
                    check_refusals(refusals, len(lengths), remedy)
                else:
                    writer.append(sample_id, sample)
                bar.update(lengths[sample_id])
    finish_store(store, rank)


def rank_slice(lengths: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return the samples that this rank captures, ascending.

    They depend on the lengths only: ranks that start at different times see different samples missing, and
    still leave none out. Lengths are distributed evenly.
    """
    by_length = np.argsort(-np.asarray(lengths), kind="stable")
    return sorted(by_length[rank::world_size].tolist())


def open_store(store: StoreSpec, rank: int = 0) -> list[int]:
    """Reserve the directory for this capture. Every rank calls this.

    Returns:
        The ids of the missing samples, ascending. Other writers may be capturing them.

    Raises:
        UserError: the directory holds another capture.
    """
    claim(store.directory, store.fields, rank)
    missing = missing_ids(store.directory, store.shards.records(), len(store.dataset))
    if missing and rank == 0:
        # The store was finished and has lost a shard.
        (store.directory / MANIFEST).unlink(missing_ok=True)
    return missing


def check_store_refusals(store: StoreSpec) -> dict[int, str]:
    """Return the reasons of the refused samples; raise UserError where there are too many."""
    found = refused(store.directory)
    remedy = retry_remedy(store.directory)
    check_refusals(found, len(store.dataset), remedy)
    return found


def check_space(store: StoreSpec, missing: Sequence[int], shape: StateShape) -> None:
    """Print how much will be captured; raise UserError where the disk cannot hold it."""
    rows = Rows(*dataset_rows(store.dataset)[missing].sum(axis=0).tolist())
    needed, free = encoded_bytes(store.codec, rows, shape), shutil.disk_usage(store.directory).free
    print(
        f"capture: {len(missing):,} samples, {rows.tokens:,} tokens to {store.directory}, "
        f"{needed / 1e9:.2f} GB ({store.codec}) of {free / 1e9:.2f} GB free",
        file=sys.stderr,
    )
    if needed > free:
        what = f"The store needs {needed / 1e9:.2f} GB where {free / 1e9:.2f} GB are free"
        raise disk_full(store.directory, what)


def finish_store(store: StoreSpec, rank: int = 0) -> None:
    """Return once the store is finished: every sample is captured or refused, and the manifest says so.

    Rank 0 writes the manifest from the shards that it sees once no sample is missing. Where several have a
    sample, the first one by name counts. What is written afterwards holds duplicates only and is not part of
    the store. The other ranks wait for the manifest.

    Raises:
        UserError: too many samples are refused.
    """
    directory, num_samples = store.directory, len(store.dataset)
    if rank != 0:
        # The manifest of an earlier run may still exist while a shard that it lists is replaced.
        _wait_until(lambda: describes(directory, store.fields))
        return
    _wait_until(lambda: not missing_ids(directory, store.shards.records(), num_samples))
    for line in refusal_lines(check_store_refusals(store), num_samples, directory):
        print(f"capture: {line}", file=sys.stderr)
    if not describes(directory, store.fields):
        remove_leftovers(store.shards)
        write_manifest(store.shards, store.fields)


def _wait_until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds, which is looked at less and less often."""
    pause = _POLL_SECONDS
    while not condition():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
