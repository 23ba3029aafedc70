"""The beginning of a capture to a store: what the store is for, what it lacks, and how large it becomes."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import Dataset
from numpy.typing import NDArray

from data.capture.refusals import MAX_REFUSED_FRACTION, check_refusals, retry_remedy
from data.capture.tokens import dataset_rows, tokens_fingerprint
from data.store.codec import Encoding, Rows, encoded_bytes
from data.store.index import MANIFEST, as_read_back, claim, missing_ids
from data.store.shards import FinishedShards, refused
from data.store.writer import disk_full


class CapturedStates(Protocol):
    """The properties that decide how large captured states are."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class StoreSpec:
    """A store that is to be filled with the states of a dataset."""

    directory: Path
    dataset: Dataset  # columns input_ids and loss_mask
    encoding: Encoding
    max_refused_fraction: float = MAX_REFUSED_FRACTION  # of the dataset's samples


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


def check_store_refusals(store: StoreSpec) -> dict[int, str]:
    """Return the reasons of the refused samples; raise UserError where there are too many."""
    found = refused(store.directory)
    remedy = retry_remedy(store.directory)
    check_refusals(found, len(store.dataset), store.max_refused_fraction, remedy)
    return found


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
