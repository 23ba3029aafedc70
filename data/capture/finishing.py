"""The end of a capture to a store: rank 0 decides which shards count, and the other ranks follow."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.capture.opening import StoreSpec, check_store_refusals
from data.capture.refusals import refusal_lines
from data.capture.tokens import TokenRows
from data.progress import format_seconds, tracked
from data.store.index import MANIFEST, describes, missing_ids, write_manifest
from data.store.shards import FinishedShards, ShardRecord, open_shard
from data.store.writer import remove_all_leftovers
from eagle31.errors import UserError

_POLL_SECONDS = 0.5
_LOOK_SECONDS = 10.0  # a manifest that has not changed is read again, as its shards may appear later


def finish_store(
    store: StoreSpec,
    fields: Mapping[str, Any],
    rank: int = 0,
    *,
    progress: bool = False,
    stall_seconds: float | None = None,
) -> None:
    """Return once the store is finished: every sample is captured or refused, and the manifest says so.

    Rank 0 writes the manifest from the shards that it sees once no sample is missing. Where several have a
    sample, the first one by name counts. What is written afterwards holds duplicates only and is not part of
    the store. The other ranks wait for the manifest.

    Args:
        fields: from `store_fields`.
        stall_seconds: rank 0 waits this long for another sample; None waits for any time.

    Raises:
        UserError: a shard holds other tokens than the dataset, or has another encoding; too many samples are
            refused; or no missing sample has come for `stall_seconds`.
    """
    if rank != 0:
        _wait_for_manifest(store.directory, fields)
        return
    directory, num_samples = store.directory, len(store.dataset)
    records = _complete_records(directory, num_samples, stall_seconds)
    for line in refusal_lines(check_store_refusals(store), num_samples, directory):
        print(f"capture: {line}", file=sys.stderr)
    if describes(directory, fields, records):
        return
    remove_all_leftovers(directory)
    tokens = TokenRows(store.dataset)
    for record in tracked(records, "check the store", "shards", shown=progress):
        _check_shard(directory, record, tokens, fields)
    write_manifest(directory, fields, records)


def _complete_records(directory: Path, num_samples: int, stall_seconds: float | None) -> list[ShardRecord]:
    """Return the shards once no sample is missing in them."""
    shards = FinishedShards(directory)
    num_missing, progressed = num_samples + 1, time.monotonic()
    while True:
        records = shards.records()
        missing = missing_ids(directory, records, num_samples)
        if not missing:
            return records
        if len(missing) < num_missing:
            num_missing, progressed = len(missing), time.monotonic()
        elif stall_seconds is not None and time.monotonic() - progressed > stall_seconds:
            remedy = (
                f"No sample has come for {format_seconds(stall_seconds)} and {num_missing:,} are missing, "
                f"such as {missing[0]}: another rank hangs, or its shards do not appear here. Run the same "
                "command again, which captures what is missing; capture.stall_minutes sets the time."
            )
            raise UserError("output_dir", directory, remedy)
        time.sleep(_POLL_SECONDS)


def _wait_for_manifest(directory: Path, fields: Mapping[str, Any]) -> None:
    """Wait until the manifest describes a store of these fields whose shards are all there.

    The manifest of an earlier run may still exist while a shard that it lists is replaced.
    """
    path, seen, looked = directory / MANIFEST, None, 0.0
    while True:
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            time.sleep(_POLL_SECONDS)
            continue
        state = (stat.st_ino, stat.st_mtime_ns)
        if state != seen or time.monotonic() - looked > _LOOK_SECONDS:
            seen, looked = state, time.monotonic()
            if describes(directory, fields):
                return
        time.sleep(_POLL_SECONDS)


def _check_shard(directory: Path, record: ShardRecord, tokens: TokenRows, fields: Mapping[str, Any]) -> None:
    path = directory / record.file
    if record.encoding.to_json() != fields["encoding"]:
        raise UserError("capture", path, f"Its encoding is {record.encoding.to_json()}; delete it.")
    shard = open_shard(path)
    ids, mask = shard.read_column("input_ids").numpy(), shard.read_column("loss_mask").numpy()
    lengths, expected_ids, expected_mask = tokens.flat(record.sample_ids)
    same = np.array_equal(lengths, record.lengths) and np.array_equal(ids, expected_ids)
    if not same or not np.array_equal(mask, expected_mask):
        remedy = "It holds other tokens than the dataset; delete it and run again to capture it again."
        raise UserError("capture", path, remedy)
