"""Access to the tokenised dataset's columns as arrays, without Python lists of tokens."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor

_COLUMNS = ["input_ids", "loss_mask"]
_BATCH_ROWS = 1000


def dataset_lengths(dataset: Dataset) -> list[int]:
    """Return the number of tokens of each sample."""
    tables = dataset.with_format("arrow", columns=["input_ids"]).iter(batch_size=_BATCH_ROWS)
    return [length for table in tables for length in pc.list_value_length(table["input_ids"]).to_pylist()]


def tokens_fingerprint(dataset: Dataset) -> str:
    """Return the sha256 of the samples' lengths, ids and masks, whatever the dataset's origin."""
    digest = hashlib.sha256()
    for lengths, ids, mask in token_batches(dataset):
        digest.update(lengths.astype("<i4").tobytes())
        digest.update(ids.astype("<i4").tobytes())
        digest.update(mask.astype("u1").tobytes())
    return digest.hexdigest()


def dataset_rows(dataset: Dataset) -> NDArray:
    """Return the `kept_rows` of every sample. int64 [N, 3]: tokens, aux, final."""
    keys, positions, _ = dataset_supervision(dataset).T
    return np.stack([dataset_lengths(dataset), keys, positions], axis=1)


def dataset_supervision(dataset: Dataset) -> NDArray:
    """Return what training computes of every sample.

    Returns:
        int64 [N, 3]: the keys that its supervised positions read, the supervised positions, and the pairs of
        a supervised position and a key that it reads.
    """
    parts = [_supervision(lengths, mask) for lengths, _, mask in token_batches(dataset)]
    return np.concatenate([*parts, np.empty((0, 3), np.int64)])


class TokenRows:
    """Reads samples by index, several at a time: one access to a dataset costs as much as many rows."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset.with_format("arrow", columns=_COLUMNS)

    def read(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return input_ids int64 [T] and loss_mask bool [T] of each sample."""
        lengths, ids, mask = _arrays(self._dataset[list(indices)])
        sizes = lengths.tolist()
        return list(zip(torch.tensor(ids).split(sizes), torch.tensor(mask).split(sizes), strict=True))


def token_batches(dataset: Dataset) -> Iterator[tuple[NDArray, NDArray, NDArray]]:
    """Yield of some samples at a time their lengths [n], and their concatenated ids and masks [T]."""
    return map(_arrays, dataset.with_format("arrow", columns=_COLUMNS).iter(batch_size=_BATCH_ROWS))


def _arrays(table: pa.Table) -> tuple[NDArray, NDArray, NDArray]:
    ids, mask = table["input_ids"], table["loss_mask"]
    lengths = pc.list_value_length(ids).to_numpy().astype(np.int64)
    flat_ids, flat_mask = (pc.list_flatten(column).to_numpy() for column in (ids, mask))
    return lengths, flat_ids.astype(np.int64), flat_mask.astype(bool)


def _supervision(lengths: NDArray, mask: NDArray) -> NDArray:
    starts = lengths.cumsum() - lengths
    sample = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(mask)) - starts[sample]
    # The token after a supervised position, at which the target's first distribution is.
    supervised = mask.copy()
    supervised[:-1] &= mask[1:] & (sample[1:] == sample[:-1])
    supervised &= (positions > 0) & (positions < lengths[sample] - 1)
    of, read = sample[supervised], positions[supervised]  # a position reads as many keys
    keys = np.zeros_like(lengths)
    np.maximum.at(keys, of, read)
    pairs = np.bincount(of, weights=read, minlength=len(lengths)).astype(np.int64)
    return np.stack([keys, np.bincount(of, minlength=len(lengths)), pairs], axis=1)
